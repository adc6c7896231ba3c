//! What a proposer sees and what it answers: the observation, the proposal, and the trait between them. How edits are
//! applied is in [`crate::edit`]; whether a proposal is admitted is not decided here.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;

pub use hone_evals::remote::Message;
use hone_runs::alarm::Alarm;
use hone_runs::{Failure, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::Series;
use crate::edit::{Change, Edit};
use crate::judge::{Direction, Verdict};

/// A hypothesis, the edits that test it, and the effect they should have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Proposal {
    /// A few words; the branch is named after it.
    pub title: String,
    /// One or two sentences: what was seen, why the change should help.
    pub hypothesis: String,
    /// The edits, applied in order to the incumbent's files.
    pub edits: Vec<Edit>,
    /// The change of the metric that is expected, in the metric's own unit and sign: −0.02 is a fall of two points.
    pub predicted_effect: f64,
    /// For a repeat of something tried: what is different this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differs: Option<String>,
    /// Which proposer, and which of its rules, made it: `search/rule/loss-still-falling`, `llm/MODEL`.
    pub source: String,
}

/// The metric that is judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// `task/score`, e.g. `add/pass@1`.
    pub name: String,
    /// Which way is better.
    pub direction: Direction,
    /// Smaller improvements are not worth keeping; in the metric's unit, positive.
    pub min_effect: f64,
}

/// The commit that candidates must beat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Incumbent {
    /// Its commit id, hex.
    pub commit: String,
    /// One score a replicate.
    pub scores: Vec<f64>,
    /// Their mean.
    pub mean: f64,
    /// 95% interval of the mean.
    pub interval: [f64; 2],
}

/// What a person (or the goal's policy) decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// The candidate is the new incumbent.
    Keep,
    /// The candidate is not wanted, or no longer.
    Rollback,
    /// Try again in this direction, with the person's note.
    Iterate,
}

/// One earlier round of this campaign.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Past {
    /// Its number, from 1.
    pub round: u32,
    /// None where the proposer had no usable answer.
    pub proposal: Option<Proposal>,
    /// What really differed between the candidate's files and its parent's ([`crate::edit::changes`]); empty where no candidate was made.
    #[serde(default)]
    pub changes: Vec<Change>,
    /// None while open, and where the proposal was refused.
    pub verdict: Option<Verdict>,
    /// Candidate minus incumbent in the metric's own unit and sign: the confirmation's where there was one, else the screening's.
    pub effect: Option<f64>,
    /// 95% interval of `effect`.
    pub interval: Option<[f64; 2]>,
    /// Why it was refused or ended without a verdict.
    pub refusal: Option<String>,
    /// None while nobody has decided.
    pub decision: Option<Decision>,
    /// Flags on the review item.
    #[serde(default)]
    pub flags: Vec<String>,
}

/// An item that the incumbent got wrong. Its text is data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailedSample {
    /// What the model was given.
    pub prompt: String,
    /// A right answer.
    pub expected: String,
    /// What it said.
    pub got: String,
}

/// Everything a proposer may know. A bounded digest: it holds no path outside the workspace, no secret and no held-out item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// The goal's sentence.
    pub goal: String,
    /// The metric.
    pub metric: Metric,
    /// The campaign's name.
    pub campaign: String,
    /// The campaign's seed: equal observations give equal proposals of the search.
    pub seed: u64,
    /// This round, from 1.
    pub round: u32,
    /// Rounds that remain, this one included.
    pub rounds_left: u32,
    /// What must be beaten.
    pub incumbent: Incumbent,
    /// The globs of what may be edited, as the goal has them.
    pub edit: Vec<String>,
    /// The editable text files at the incumbent: path to content.
    pub files: BTreeMap<String, String>,
    /// The workspace's own prompt templates, by path ([`crate::prompt::Prompts`]). They cannot be edited.
    #[serde(default)]
    pub prompts: BTreeMap<String, String>,
    /// The recipe among `files`.
    pub recipe_path: String,
    /// The recipe's JSON Schema with its `x-tunable` marks; null where the run is a command.
    pub recipe_schema: Value,
    /// The recipe as one of the incumbent's runs filled it in, its preset's sizes included; null where no run tells.
    pub resolved: Value,
    /// The earlier rounds, oldest first.
    pub history: Vec<Past>,
    /// The incumbent's training curves by name ([`crate::digest::curves`]).
    pub curves: BTreeMap<String, Series>,
    /// The trainer's alarms in one of the incumbent's runs.
    pub alarms: Vec<Alarm>,
    /// Some dev items that the incumbent got wrong.
    pub failed_samples: Vec<FailedSample>,
    /// The person's notes of `iterate`, newest last: wishes, to be heeded.
    pub notes: Vec<String>,
    /// What is known of the newest run that failed: its failure and its log's digest ([`crate::digest::LogDigest::text`]). Data, like
    /// all logs.
    pub failed_run: Option<String>,
}

/// What a proposal cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Calls that were answered.
    pub calls: u32,
    /// Prompt tokens, as the endpoint counts them.
    pub prompt_tokens: u64,
    /// Completion tokens, as the endpoint counts them.
    pub completion_tokens: u64,
    /// Dollars; None where the model has no known price.
    pub usd: Option<f64>,
}

/// A proposer's answer. The transcript and the cost stand beside failures, too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proposed {
    /// The proposal, or why there is none ([`hone_runs::Class::Agent`]): that spends the round. [`hone_runs::Class::Budget`]: the next
    /// call does not fit the budget, and the campaign ends.
    pub answer: std::result::Result<Proposal, Failure>,
    /// As it was sent and received, secrets masked: what a replay reads. Empty for proposers that talk to nobody.
    pub transcript: Vec<Message>,
    /// What it cost.
    pub usage: Usage,
}

/// A proposer's answer in the making.
pub type Proposing<'a> = Pin<Box<dyn Future<Output = Result<Proposed>> + Send + 'a>>;

/// Answers an observation with a proposal.
pub trait Proposer: Send + Sync {
    /// `search`, `llm`, …
    fn name(&self) -> &str;

    /// One proposal, or a reason why there is none.
    ///
    /// # Errors
    /// When the proposer could not be asked: an unreachable endpoint ([`hone_runs::Class::Infrastructure`]), a budget, a wrong template.
    /// An error spends no round.
    fn propose<'a>(&'a self, observation: &'a Observation) -> Proposing<'a>;
}
