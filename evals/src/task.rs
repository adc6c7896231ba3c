//! A task: a generator of problems and a verifier of answers. RL trains on it, suites score it. A problem belongs to training or to
//! evaluation by its hash, so the two never overlap. Each native task has a file of its own under `task/`.

mod addition;
mod generated;

use addition::Addition;
use generated::Generated;
use hone_runs::{Class, Failure, Result};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::Path;

/// The share of each native task's problems that is kept for evaluation and never drawn in training.
pub const EVALUATION_SHARE: f64 = 0.2;

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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
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

impl TaskSpec {
    /// The task that this names. `root` is the workspace, from which files are read.
    ///
    /// # Errors
    /// [`Class::Usage`] when the task is unknown, or a parameter is missing, out of range, or not the task's own.
    pub fn build(&self, _root: &Path) -> Result<Box<dyn Task>> {
        match self.task.as_str() {
            "addition" => {
                self.only(&["digits"])?;
                Ok(Box::new(Generated(Addition::new(self.digits.unwrap_or(2))?)))
            }
            other => Err(Failure::new(Class::Usage, format!("There is no task `{other}`.")).hint(
                "native tasks: addition, reverse, countdown, text; or name a suite file such as evals/add.yaml.",
            )),
        }
    }

    /// Refuses every parameter that is given and not among `own`.
    fn only(&self, own: &[&str]) -> Result<()> {
        let given =
            [("digits", self.digits.is_some()), ("length", self.length.is_some()), ("file", self.file.is_some())];
        match given.iter().find(|(name, is_given)| *is_given && !own.contains(name)) {
            None => Ok(()),
            Some((name, _)) => {
                Err(Failure::new(Class::Usage, format!("The task `{}` has no parameter `{name}`.", self.task))
                    .hint(format!("its parameters: {}.", own.join(", "))))
            }
        }
    }
}

/// Hash of `parts`, hex. Each part's length is hashed too, so that no two lists of parts collide.
pub(crate) fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

/// Where `key` falls in [0, 1) for `purpose`: uniform over keys, the same on every machine, independent between purposes.
pub(crate) fn point(purpose: &str, key: &str) -> f64 {
    let mut hash = Sha256::new();
    hash.update(purpose);
    hash.update([0]);
    hash.update(key);
    let first: [u8; 8] = hash.finalize()[..8].try_into().expect("a SHA-256 has 32 bytes");
    // The top 53 bits are all that an f64 in [0, 1) holds evenly.
    (u64::from_be_bytes(first) >> 11) as f64 / (1u64 << 53) as f64
}
