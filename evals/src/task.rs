//! A task: a generator of problems and a verifier of answers. RL trains on it, suites score it. A problem belongs to training or to
//! evaluation by its hash, so the two never overlap. Each native task has a file of its own under `task/`.

mod addition;
mod countdown;
mod expression;
mod generated;
mod json_lines;
mod reverse;
mod text;

use crate::suite::{Split, Suite};
use addition::Addition;
use countdown::Countdown;
use generated::Generated;
use hone_runs::{Class, Failure, Result, config};
pub(crate) use json_lines::JsonLines;
use rand_chacha::ChaCha8Rng;
use reverse::Reverse;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::Path;
use text::Text;

/// The names of the native tasks.
pub const NATIVE_TASKS: [&str; 4] = ["addition", "reverse", "countdown", "text"];

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
    /// Addition: digits of each operand. Default 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digits: Option<usize>,
    /// Reverse: letters of the text, default 8. Countdown: how many numbers, default 4. Text: bytes a passage, default 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Text: the file, relative to the workspace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// A suite file with several tasks: which of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A suite file: its split. Only `train` may be trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
}

impl TaskSpec {
    /// The task that this names, as training sees it. `root` is the workspace, from which files are read.
    ///
    /// # Errors
    /// [`Class::Usage`] when the task is unknown, a file cannot be used, or a parameter is missing, out of range, or not the task's own.
    pub fn build(&self, root: &Path) -> Result<Box<dyn Task>> {
        match self.task.as_str() {
            "addition" => {
                self.only(&["digits"])?;
                Ok(Box::new(Generated(Addition::new(self.digits.unwrap_or(2))?)))
            }
            "reverse" => {
                self.only(&["length"])?;
                Ok(Box::new(Generated(Reverse::new(self.length.unwrap_or(8))?)))
            }
            "countdown" => {
                self.only(&["length"])?;
                Ok(Box::new(Generated(Countdown::new(self.length.unwrap_or(4))?)))
            }
            "text" => {
                self.only(&["file", "length"])?;
                let file = self.file.as_deref().ok_or_else(|| {
                    Failure::new(Class::Usage, "The task `text` needs a file.").hint("add `file: data/corpus.txt`")
                })?;
                Ok(Box::new(Text::open(root, file, self.length.unwrap_or(512))?))
            }
            suite if suite.ends_with(".yaml") || suite.ends_with(".yml") => {
                self.only(&["name", "split"])?;
                if let Some(split @ (Split::Dev | Split::HeldOut)) = self.split {
                    let message = format!("The {split} split of {suite} is for evaluation and cannot be trained on.");
                    return Err(Failure::new(Class::Usage, message).hint("use `split: train`, or leave `split` out"));
                }
                Suite::load(root, suite)?.into_training(self.name.as_deref())
            }
            other => {
                let failure = Failure::new(Class::Usage, format!("There is no task `{other}`."));
                Err(match config::nearest(other, NATIVE_TASKS) {
                    Some(name) => failure.hint(format!("did you mean `{name}`?")),
                    None => failure.hint(format!(
                        "native tasks: {}; or a suite file such as evals/add.yaml",
                        NATIVE_TASKS.join(", ")
                    )),
                })
            }
        }
    }

    /// Refuses every parameter that is given and not among `own`.
    fn only(&self, own: &[&str]) -> Result<()> {
        let given = [
            ("digits", self.digits.is_some()),
            ("length", self.length.is_some()),
            ("file", self.file.is_some()),
            ("name", self.name.is_some()),
            ("split", self.split.is_some()),
        ];
        match given.iter().find(|(name, is_given)| *is_given && !own.contains(name)) {
            None => Ok(()),
            Some((name, _)) => {
                Err(Failure::new(Class::Usage, format!("The task `{}` has no parameter `{name}`.", self.task))
                    .hint(format!("its parameters: {}", own.join(", "))))
            }
        }
    }
}

/// The bytes of a data file of the workspace.
fn read(root: &Path, file: &str) -> Result<Vec<u8>> {
    std::fs::read(root.join(file)).map_err(|e| {
        Failure::new(Class::Usage, format!("Cannot read {file}: {e}."))
            .hint("data files are named relative to the workspace")
    })
}

/// Refuses a data file whose bytes have not the SHA-256 `wanted`; gives the bytes.
pub(crate) fn check_hash(root: &Path, file: &str, wanted: &str) -> Result<Vec<u8>> {
    let bytes = read(root, file)?;
    let actual = hex::encode(Sha256::digest(&bytes));
    if actual.eq_ignore_ascii_case(wanted) {
        return Ok(bytes);
    }
    let message = format!("{file} is not the file that the suite names: its SHA-256 is {actual}, not {wanted}.");
    Err(Failure::new(Class::Integrity, message)
        .hint("restore the file; or, if the change is meant, write the new hash into the suite"))
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

/// Where `key` stands in a random order of all keys for `purpose`: the same on every machine, independent between purposes.
pub(crate) fn rank(purpose: &str, key: &str) -> u64 {
    let mut hash = Sha256::new();
    hash.update(purpose);
    hash.update([0]);
    hash.update(key);
    let first: [u8; 8] = hash.finalize()[..8].try_into().expect("a SHA-256 has 32 bytes");
    u64::from_be_bytes(first)
}

/// Where `key` falls in [0, 1) for `purpose`: [`rank`], uniform over keys.
pub(crate) fn point(purpose: &str, key: &str) -> f64 {
    // The top 53 bits are all that an f64 in [0, 1) holds evenly.
    (rank(purpose, key) >> 11) as f64 / (1u64 << 53) as f64
}
