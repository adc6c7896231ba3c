//! The small trait through which evals see a model: complete, and score text. The trainer's engine and the remote client implement it.

use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize};

/// How to sample. The same fields stand in a suite's `sampling`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// At most this many tokens.
    pub max_tokens: usize,
    /// Samples an item.
    pub k: usize,
    /// Strings that end a completion; they are not part of its text.
    pub stop: Vec<String>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, max_tokens: 64, k: 1, stop: vec!["\n".into()] }
    }
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Finish {
    /// An end token or a stop string.
    Stop,
    /// The token limit.
    Length,
    /// The repetition stop.
    Repetition,
}

/// One sampled reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The text, without the end token or stop string.
    pub text: String,
    /// Tokens generated, the end token included.
    pub tokens: usize,
    /// Why it ended.
    pub finish: Finish,
}

/// The log-likelihood of a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextScore {
    /// Sum of the natural log-probs of the predicted tokens.
    pub logprob: f64,
    /// How many were predicted.
    pub tokens: usize,
    /// How many bytes they stand for.
    pub bytes: usize,
}

/// A model that can be evaluated.
pub trait LanguageModel {
    /// `sampling.k` completions of each prompt. Equal (seed, prompt, sampling) give equal completions, whatever the company.
    ///
    /// # Errors
    /// When the model cannot answer.
    fn complete(&self, prompts: &[String], sampling: &Sampling, seed: u64) -> Result<Vec<Vec<Completion>>>;

    /// Scores each text from its first predictable token.
    ///
    /// # Errors
    /// When the model cannot score: many remote endpoints cannot.
    fn score(&self, texts: &[String]) -> Result<Vec<TextScore>>;

    /// `message` as the only message of a conversation, in the model's own chat template, ready for [`LanguageModel::complete`].
    ///
    /// # Errors
    /// When the model has no chat template, which is the default.
    fn chat(&self, message: &str) -> Result<String> {
        let _ = message;
        Err(Failure::new(Class::Usage, "This model has no chat template.")
            .hint("leave `template: chat` out of the suite, or use a model that has one"))
    }

    /// What identifies the model and the engine in a fingerprint. The keys of [`MODEL_KEYS`] say which model is measured, all others
    /// (engine version, dtype, device, instruction set, segmentation, …) how, and scores are compared only where those are equal.
    fn identity(&self) -> serde_json::Map<String, serde_json::Value>;
}

/// The keys of [`LanguageModel::identity`] that say which model is measured: a checkpoint's hash, a model's name.
pub const MODEL_KEYS: [&str; 2] = ["checkpoint", "model"];
