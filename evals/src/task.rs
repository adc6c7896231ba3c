//! A task: a generator of problems and a verifier of answers. RL trains on it, suites score it. A problem belongs to training or to
//! evaluation by its hash, so the two never overlap.

use hone_runs::Result;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// One problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Hash of its content, hex: the same problem has the same id everywhere.
    pub id: String,
    /// What the model is given.
    pub prompt: String,
    /// A right answer (an SFT target); where several are right, one of them.
    pub answer: String,
    /// The values that a suite's prompt template may use, prompt and answer included.
    pub fields: serde_json::Map<String, serde_json::Value>,
}

/// A generator of problems and a verifier of answers.
pub trait Task: Send + Sync {
    /// Its name, e.g. `addition`.
    fn name(&self) -> &str;

    /// A problem of the train split, drawn from `rng`.
    ///
    /// # Errors
    /// When there is none.
    fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Problem>;

    /// `n` distinct problems of the evaluation side, the same ones every time; fewer where there are not so many.
    ///
    /// # Errors
    /// When data cannot be read.
    fn evaluation(&self, n: usize) -> Result<Vec<Problem>>;

    /// The reward of a completion: 1 right, 0 wrong, fractions where the task has them. Never NaN.
    fn verify(&self, problem: &Problem, completion: &str) -> f64;

    /// Hash of everything that defines the task: name, parameters, data. Part of every fingerprint.
    fn hash(&self) -> String;
}

/// What a recipe's `task:` with its parameters, or a suite's `data:`, says. Parameters not of that task are refused by [`TaskSpec::build`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TaskSpec {
    /// `addition`, `reverse`, `countdown`, `text`, or a suite file of the workspace.
    pub task: String,
    /// Addition: digits of each operand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digits: Option<usize>,
    /// Reverse: length of the text. Countdown: how many numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Text, JSON Lines: the file, relative to the workspace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}
