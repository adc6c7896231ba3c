//! The recipe: what a person writes to train a model, its defaults, its contradictions, and what it will cost. Not for
//! training itself (`train.rs`).
//!
//! Every key has a vetted default, so `- rl: {}` is a complete stage and any other key is visibly the person's own. Keys
//! that a search may turn carry `x-tunable` in the schema: `low`, `high` and `scale` (`log` or `linear`), or `choices`.

mod check;
mod estimate;

use crate::{
    advantage::Advantage,
    config::ModelSpec,
    data::Merge,
    loss::{Algorithm, Band, Normaliser},
    tokenizer::Tokenizer,
};
pub use estimate::{Estimate, Spending, estimate};
pub(crate) use estimate::{Named, params, spending};
use hone_evals::{
    suite::Split,
    task::{Task, TaskSpec},
};
use hone_runs::{
    Class, Failure, Result, config, draws,
    quantity::{Count, Span},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// A training config: model, tokenizer, compute, optimizer, stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// A preset, fields that differ from it, or a checkpoint to start from.
    pub model: ModelSpec,
    /// `bytes`, `chars`, or a checkpoint's tokenizer file; where absent the checkpoint's own, and `bytes` for a fresh model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// What the run may spend. It stops at the first step boundary past any limit, whatever its stages say.
    pub compute: Compute,
    /// How weights are updated.
    pub optimizer: OptimizerSpec,
    /// When checkpoints are written, and how many stay.
    pub checkpoints: CheckpointSpec,
    /// What is trained, in order. Stage i ends once the part of the compute that falls to stages up to i is spent, so
    /// what a stage leaves unspent goes to those after it.
    pub stages: Vec<Stage>,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            model: ModelSpec::default(),
            tokenizer: None,
            compute: Compute::default(),
            optimizer: OptimizerSpec::default(),
            checkpoints: CheckpointSpec::default(),
            stages: vec![Stage::Sft(Sft::default())],
        }
    }
}

/// Limits; the first one reached ends the run. Counted over everything: rollouts, training and off-policy passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Compute {
    /// Rows through the model: each sampled token, each prompt token once a group, each trained row once an update. 1M
    /// where no limit is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Count>,
    /// Floating-point operations, by the formula of the model's config.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flops: Option<Count>,
    /// Wall time of the steps. Such a run depends on the machine: neither its length nor its learning rates repeat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<Span>,
}

impl Compute {
    /// The limits with the default filled in.
    pub fn resolved(self) -> Self {
        match self {
            Self { tokens: None, flops: None, seconds: None } => Self { tokens: Some(Count(1_000_000)), ..self },
            limits => limits,
        }
    }
}

/// AdamW and its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerSpec {
    /// Highest learning rate of stages that name none (rl stages take 0.3 of it).
    #[schemars(extend("x-tunable" = {"low": 1e-4, "high": 2e-2, "scale": "log"}))]
    pub lr: f64,
    /// Decay of the moments. MiniMax-M1's 0.9 and 0.95 (arXiv:2506.13585 §3.2).
    #[schemars(extend("x-tunable" = {"choices": [[0.9, 0.95], [0.9, 0.98], [0.9, 0.999], [0.8, 0.95]], "scale": "choice"}))]
    pub betas: [f64; 2],
    /// Added to the root of the second moment. MiniMax-M1's 1e-15: gradients of RL fall far below the usual 1e-8.
    #[schemars(extend("x-tunable" = {"choices": [1e-15, 1e-12, 1e-8], "scale": "choice"}))]
    pub eps: f64,
    /// Decoupled; matrices only.
    #[schemars(extend("x-tunable" = {"low": 1e-3, "high": 0.3, "scale": "log"}))]
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm.
    #[schemars(extend("x-tunable" = {"low": 0.1, "high": 10.0, "scale": "log"}))]
    pub clip: f64,
    /// How the learning rate falls over a stage.
    #[schemars(extend("x-tunable" = {"choices": ["constant", "linear", "cosine"], "scale": "choice"}))]
    pub schedule: Schedule,
    /// Updates at a stage's start over which the learning rate rises.
    #[schemars(extend("x-tunable" = {"low": 1, "high": 100, "scale": "log"}))]
    pub warmup: u64,
    /// Learning rate at a stage's end, as a share of its highest.
    #[schemars(extend("x-tunable" = {"choices": [0.0, 0.1, 0.3], "scale": "choice"}))]
    pub final_lr: f64,
    /// Coefficient of the experts' load-balancing loss, in Hugging Face's scaling.
    #[schemars(extend("x-tunable" = {"low": 1e-4, "high": 0.1, "scale": "log"}))]
    pub balance: f64,
    /// How far each update moves the selection bias of a sigmoid router's expert against its load (arXiv:2408.15664; MiniMax
    /// does not publish its own rule).
    pub bias_rate: f64,
}

impl Default for OptimizerSpec {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: [0.9, 0.95],
            eps: 1e-15,
            weight_decay: 0.1,
            clip: 1.0,
            schedule: Schedule::Cosine,
            warmup: 10,
            final_lr: 0.1,
            balance: 0.001,
            bias_rate: 0.001,
        }
    }
}

/// How a learning rate falls from its highest to its last over a stage's compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// Not at all.
    Constant,
    /// In a straight line.
    Linear,
    /// Along half a cosine.
    Cosine,
}

/// When checkpoints are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSpec {
    /// Every so many steps, beside the last.
    pub every: u64,
    /// The newest so many stay.
    pub keep: usize,
}

impl Default for CheckpointSpec {
    fn default() -> Self {
        Self { every: 100, keep: 2 }
    }
}

/// One stage of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Supervised: next-token loss on a task's answers, or on a whole text.
    Sft(Sft),
    /// Reinforcement learning on a task's verifier.
    Rl(Rl),
}

/// What a stage of every kind has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Common {
    /// Part of the compute, relative to the other stages'.
    pub share: f64,
    /// Most steps.
    pub steps: Option<u64>,
    /// Most rows a forward pass.
    pub micro_batch: usize,
}

impl Stage {
    /// Highest learning rate of this stage under `optimizer`.
    pub fn lr(&self, optimizer: &OptimizerSpec) -> f64 {
        match self {
            Stage::Sft(stage) => stage.lr.unwrap_or(optimizer.lr),
            Stage::Rl(stage) => stage.lr.unwrap_or(0.3 * optimizer.lr),
        }
    }

    /// `sft` or `rl`.
    pub fn kind(&self) -> &'static str {
        match self {
            Stage::Sft(_) => "sft",
            Stage::Rl(_) => "rl",
        }
    }

    /// The task it trains on.
    pub fn task(&self) -> TaskSpec {
        macro_rules! task {
            ($stage:ident) => {
                TaskSpec {
                    task: $stage.task.clone(),
                    digits: $stage.digits,
                    length: $stage.length,
                    file: $stage.file.clone(),
                    name: $stage.name.clone(),
                    split: $stage.split,
                }
            };
        }
        match self {
            Stage::Sft(stage) => task!(stage),
            Stage::Rl(stage) => task!(stage),
        }
    }

    /// The keys that every kind has.
    pub fn common(&self) -> Common {
        match *self {
            Stage::Sft(Sft { share, steps, micro_batch, .. }) | Stage::Rl(Rl { share, steps, micro_batch, .. }) => {
                Common { share, steps, micro_batch }
            }
        }
    }
}

/// A supervised stage. A step is one update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sft {
    /// What to train on: `addition`, `reverse`, `countdown`, `text`, or a suite file of the workspace (its train split).
    pub task: String,
    /// Addition: digits of each operand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digits: Option<usize>,
    /// Reverse: length of the text. Countdown: how many numbers. Text: bytes a passage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Text: the file, relative to the workspace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// A suite file with several tasks: which of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A suite file: its split, of which only `train` may be trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// Distinct examples, drawn once and passed over in a new order each epoch; absent: a fresh one every time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub examples: Option<Count>,
    /// Rows a step, at most (one longer example is a step of its own).
    #[schemars(extend("x-tunable" = {"low": 64, "high": 4096, "scale": "log"}))]
    pub batch: usize,
    /// Which tokens are trained.
    pub loss: Trained,
    /// Highest learning rate; the optimizer's where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-tunable" = {"low": 1e-4, "high": 2e-2, "scale": "log"}))]
    pub lr: Option<f64>,
    /// Part of the compute, relative to the other stages' shares.
    #[schemars(extend("x-tunable" = {"low": 0.1, "high": 10.0, "scale": "log"}))]
    pub share: f64,
    /// Most steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Most rows a forward pass; a step of more accumulates gradients, to the same result but for rounding.
    pub micro_batch: usize,
}

impl Default for Sft {
    fn default() -> Self {
        Self {
            task: "addition".into(),
            digits: None,
            length: None,
            file: None,
            name: None,
            split: None,
            examples: None,
            batch: 256,
            loss: Trained::Answer,
            lr: None,
            share: 1.0,
            steps: None,
            micro_batch: 2048,
        }
    }
}

/// Which tokens of an example are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Trained {
    /// The answer and the end token.
    Answer,
    /// The prompt too.
    All,
}

/// A reinforcement stage. A step samples one batch of groups and makes `epochs` · `minibatches` updates on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rl {
    /// What to train on: `addition`, `reverse`, `countdown`, `text`, or a suite file of the workspace (its train split).
    pub task: String,
    /// Addition: digits of each operand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digits: Option<usize>,
    /// Reverse: length of the text. Countdown: how many numbers. Text: bytes a passage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Text: the file, relative to the workspace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// A suite file with several tasks: which of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A suite file: its split, of which only `train` may be trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// Which loss is minimised.
    #[schemars(extend("x-tunable" = {"choices": ["cispo", "grpo"], "scale": "choice"}))]
    pub algorithm: Algorithm,
    /// Highest importance ratio, **absolute** (an ε of 0.2 is a cap of 1.2). Absent: 5 for cispo (ScaleRL; the paper keeps
    /// its own to itself), 1.2 for grpo, 1.0004 for gspo.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-tunable" = {"low": 1.1, "high": 10.0, "scale": "log"}))]
    pub ratio_cap: Option<f64>,
    /// Lowest importance ratio, absolute. Absent: 0 for cispo, as published; 0.8 for grpo, 0.9997 for gspo.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_floor: Option<f64>,
    /// How terms are weighed. Absent: prompt-average for cispo, sequence-mean for grpo and gspo, as published.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-tunable" = {"choices": ["prompt-average", "token-mean", "sequence-mean", "fixed-length"], "scale": "choice"}))]
    pub normaliser: Option<Normaliser>,
    /// How a group's rewards become advantages.
    #[schemars(extend("x-tunable" = {"choices": ["mean-std", "mean", "leave-one-out"], "scale": "choice"}))]
    pub advantage: Advantage,
    /// Prompts a step.
    #[schemars(extend("x-tunable" = {"low": 8, "high": 128, "scale": "log"}))]
    pub prompts: usize,
    /// Completions a prompt.
    #[schemars(extend("x-tunable" = {"low": 4, "high": 32, "scale": "log"}))]
    pub group: usize,
    /// Sampling temperature; log-probs are taken at it on both sides.
    #[schemars(extend("x-tunable" = {"low": 0.6, "high": 1.4, "scale": "linear"}))]
    pub temperature: f64,
    /// Most tokens a completion.
    pub max_tokens: usize,
    /// Passes over a batch. Those after the first are off-policy.
    #[schemars(extend("x-tunable" = {"low": 1, "high": 4, "scale": "linear"}))]
    pub epochs: usize,
    /// Updates a pass, each on whole groups.
    #[schemars(extend("x-tunable" = {"low": 1, "high": 8, "scale": "log"}))]
    pub minibatches: usize,
    /// Drop groups whose task scores are all equal: they teach nothing, and are not counted in any mean (DAPO).
    #[schemars(extend("x-tunable" = {"choices": [true, false], "scale": "choice"}))]
    pub dynamic_sampling: bool,
    /// Sample up to this many times more for the places of dropped groups, each time as many prompts as places are open;
    /// a batch that is still short trains as it is. 0: no more.
    #[schemars(extend("x-tunable" = {"choices": [0, 1, 3], "scale": "choice"}))]
    pub resample: usize,
    /// What becomes of completions cut off at `max_tokens`.
    pub overlong: Overlong,
    /// Halt a completion after so many consecutive tokens with p > 0.99 (MiniMax-M1: 3,000). Absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition: Option<usize>,
    /// Which completions share rows in training.
    pub merge: Merge,
    /// Highest learning rate. Absent: 0.3 of the optimizer's, since a policy's gradients are noisier than a text's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-tunable" = {"low": 3e-5, "high": 1e-2, "scale": "log"}))]
    pub lr: Option<f64>,
    /// Part of the compute, relative to the other stages' shares.
    #[schemars(extend("x-tunable" = {"low": 0.1, "high": 10.0, "scale": "log"}))]
    pub share: f64,
    /// Most steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Most rows a forward pass; an update of more accumulates gradients, to the same result but for rounding.
    pub micro_batch: usize,
}

impl Default for Rl {
    fn default() -> Self {
        Self {
            task: "addition".into(),
            digits: None,
            length: None,
            file: None,
            name: None,
            split: None,
            algorithm: Algorithm::Cispo,
            ratio_cap: None,
            ratio_floor: None,
            normaliser: None,
            advantage: Advantage::MeanStd,
            prompts: 32,
            group: 8,
            temperature: 1.0,
            max_tokens: 32,
            epochs: 1,
            minibatches: 1,
            dynamic_sampling: true,
            resample: 0,
            overlong: Overlong::Keep,
            repetition: None,
            merge: Merge::Equal,
            lr: None,
            share: 1.0,
            steps: None,
            micro_batch: 2048,
        }
    }
}

/// What becomes of completions cut off at the token limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Overlong {
    /// Trained with the reward that the verifier gives them.
    Keep,
    /// Not trained; their reward still counts in the group's mean.
    Mask,
    /// DAPO's soft penalty: over the last fifth of `max_tokens` the reward falls by up to 1.
    Penalty,
}

impl Rl {
    /// The band of ratios, with the algorithm's own defaults.
    pub fn band(&self) -> Band {
        let (floor, cap) = match self.algorithm {
            Algorithm::Cispo => (0.0, 5.0),
            Algorithm::Grpo => (0.8, 1.2),
            Algorithm::Gspo => (0.9997, 1.0004),
        };
        Band { floor: self.ratio_floor.unwrap_or(floor) as f32, cap: self.ratio_cap.unwrap_or(cap) as f32 }
    }

    /// The normaliser, with the algorithm's own default.
    pub fn normaliser(&self) -> Normaliser {
        self.normaliser.unwrap_or(match self.algorithm {
            Algorithm::Cispo => Normaliser::PromptAverage,
            Algorithm::Grpo | Algorithm::Gspo => Normaliser::SequenceMean,
        })
    }
}

impl Recipe {
    /// Reads a recipe file, each `KEY=VALUE` of `sets` laid over it before its types are checked.
    ///
    /// # Errors
    /// Usage, with the place in the file or the override at fault.
    pub fn read(path: &Path, sets: &[String]) -> Result<Self> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| {
            Failure::new(Class::Usage, format!("Cannot read {name}: {e}."))
                .hint("check that the path names a readable recipe file")
        })?;
        Self::parse(&text, &name, sets)
    }

    /// As [`Self::read`], from text; `name` is what errors call it.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(text: &str, name: &str, sets: &[String]) -> Result<Self> {
        let recipe = if sets.is_empty() {
            config::parse(text, name)?
        } else {
            let mut tree: Value = config::parse(text, name)?;
            for set in sets {
                overlay(&mut tree, set)?;
            }
            // JSON is YAML, so the same reader names the nearest key; the place within it would mean nothing.
            config::parse(&tree.to_string(), name).map_err(|mut failure| {
                failure.at = Some(format!("{name} with --set {}", sets.join(" --set ")));
                failure
            })?
        };
        Self::check(&recipe).map_err(|failure| match sets {
            [] => config::locate(failure, text, name),
            _ if failure.at.is_none() => failure.at(name),
            _ => failure,
        })?;
        Ok(recipe)
    }

    /// The tokenizer of this recipe: its own, else `own` (of the checkpoint that is started from), else bytes. An alphabet is
    /// that of a fixed sample of the tasks' train splits, the same for every seed.
    ///
    /// # Errors
    /// Usage, where there is no such tokenizer, or it is not the one that the checkpoint was trained with.
    pub(crate) fn tokenizer(&self, root: &Path, tasks: &[Box<dyn Task>], own: Option<&Tokenizer>) -> Result<Tokenizer> {
        let named = match self.tokenizer.as_deref() {
            None => return Ok(own.cloned().unwrap_or(Tokenizer::Bytes)),
            Some("bytes") => Tokenizer::Bytes,
            Some("chars") => {
                let mut texts = Vec::new();
                for (task, i) in tasks.iter().flat_map(|task| (0..ALPHABET_SAMPLE).map(move |i| (task, i))) {
                    let problem = task.draw(&mut draws(0, "alphabet", 0, i))?;
                    texts.extend([problem.prompt, problem.answer]);
                }
                Tokenizer::chars(texts.iter().map(String::as_str))?
            }
            Some(file) => Tokenizer::load(&root.join(file)).map_err(|failure| match failure.hint {
                Some(_) => failure,
                None => failure.hint("use `bytes`, `chars`, or a checkpoint's tokenizer file"),
            })?,
        };
        match own {
            Some(own) if *own != named => {
                Err(Failure::new(Class::Usage, "The checkpoint was trained with another tokenizer.")
                    .hint("leave `tokenizer` out: the checkpoint has its own"))
            }
            _ => Ok(named),
        }
    }
}

/// How many problems a task an alphabet is taken from.
const ALPHABET_SAMPLE: u64 = 2000;

/// The JSON Schema of a recipe.
pub fn schema() -> Value {
    config::schema::<Recipe>()
}

/// Lays `KEY=VALUE` over a tree: a dotted path (numbers index lists), and a value in YAML.
fn overlay(tree: &mut Value, set: &str) -> Result<()> {
    let fault = |message: String, hint: &str| Failure::new(Class::Usage, message).hint(hint).at(format!("--set {set}"));
    let (key, value) = set
        .split_once('=')
        .ok_or_else(|| fault(format!("`{set}` is not KEY=VALUE."), "write for example --set optimizer.lr=3e-4"))?;
    let value: Value = config::parse(value, "--set")?;
    let mut at = tree;
    for part in key.split('.') {
        if let Value::Array(items) = at {
            let n = items.len();
            let place = part.parse::<usize>().ok().filter(|&i| i < n);
            at = &mut items[place
                .ok_or_else(|| fault(format!("`{part}` is no place in a list of {n}."), "lists are counted from 0"))?];
        } else {
            if !at.is_object() {
                // Only nothing gives way to a mapping; a value that stands there is not silently lost.
                if !at.is_null() {
                    return Err(fault(format!("`{key}` leads into {at}, which has no keys."), "set a key above it"));
                }
                *at = Value::Object(serde_json::Map::new());
            }
            let Value::Object(map) = at else { unreachable!("made an object above") };
            at = map.entry(part).or_insert(Value::Null);
        }
    }
    *at = value;
    Ok(())
}

#[cfg(test)]
mod tests;
