//! What a campaign writes to the ledger: one type for each kind of event, and the names of the steps. What they add up to is
//! [`crate::history`]'s. Fields under `volatile` are left out of the canonical fold.

use crate::edit::Change;
use crate::goal::Goal;
use crate::judge::{Estimate, Floor, Screen, Verdict};
use crate::proposal::{Decision, Proposed};
use hone_evals::suite::Subset;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;

/// The steps of a round in their order. Round 0 is the start and the baseline; the round after the last is the closing.
pub mod step {
    /// The campaign begins.
    pub const START: &str = "start";
    /// The incumbent of the first round is trained and measured.
    pub const BASELINE: &str = "baseline";
    /// What must be beaten in this round.
    pub const OBSERVE: &str = "observe";
    /// A new incumbent is trained and measured on fresh seeds.
    pub const INCUMBENT: &str = "incumbent";
    /// A proposer answers.
    pub const PROPOSE: &str = "propose";
    /// The proposal is admitted or refused.
    pub const ADMIT: &str = "admit";
    /// The candidate's commit is written.
    pub const BRANCH: &str = "branch";
    /// Runs on the screening seeds.
    pub const SCREEN: &str = "screen";
    /// What screening says.
    pub const SCREENED: &str = "screened";
    /// Runs on fresh seeds; an incumbent's replicates count from [`super::INCUMBENT_REPLICATES`].
    pub const CONFIRM: &str = "confirm";
    /// The verdict.
    pub const JUDGE: &str = "judge";
    /// A review item.
    pub const QUEUE: &str = "queue";
    /// The policy's word (replicate 0), then people's.
    pub const DECIDE: &str = "decide";
    /// Outcome, forecast error and lesson.
    pub const LEARN: &str = "learn";
    /// What was kept against the baseline, on fresh seeds and items.
    pub const CLOSING: &str = "closing";
    /// The campaign is over.
    pub const END: &str = "end";
    /// Requests to pause, resume or stop; never in the fold.
    pub const CONTROL: &str = "control";
}

/// Where an incumbent's replicates begin in a step that also runs a candidate.
pub const INCUMBENT_REPLICATES: i64 = 100;

/// A payload with its kind.
pub trait Record: Serialize + DeserializeOwned + Clone + Send {
    /// The event's kind.
    const KIND: &'static str;
}

macro_rules! records {
    ($($type:ty: $kind:literal),* $(,)?) => { $(impl Record for $type { const KIND: &'static str = $kind; })* };
}

records! {
    Started: "started",
    Trained: "trained",
    Measured: "measured",
    Observed: "observed",
    Proposed: "proposed",
    Admission: "admission",
    crate::branch::Candidate: "candidate",
    Screened: "screened",
    Ruling: "verdict",
    Queued: "queued",
    Policy: "policy",
    Learned: "learned",
    Closed: "closed",
    Ended: "ended",
}

/// A commit that is run, and the name of its folder in the campaign's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// The commit's id.
    pub commit: String,
    /// `baseline`, `r017-raise-lr`, `kept-0123456789`.
    pub name: String,
}

/// What candidates must beat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incumbent {
    /// The commit.
    #[serde(flatten)]
    pub subject: Subject,
    /// The round whose candidate it is, 0 for the baseline: it names the screening seeds.
    pub since: u32,
}

/// A campaign begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Started {
    /// The goal as it was then; later changes of the file do not change the campaign.
    pub goal: Goal,
    /// The goal's path in the repository.
    pub goal_path: String,
    /// The commit that everything is measured from: goal, suites, data, and the first incumbent.
    pub trusted: String,
    /// The campaign's seed.
    pub seed: u64,
    /// Runs that may go on side by side.
    pub slots: usize,
    /// Data files that the suites read; as protected as the suites.
    pub data: Vec<String>,
    /// Hash of everything a candidate may not touch.
    pub protected: String,
    /// Hone's version.
    pub version: String,
    /// Campaigns that the workspace had before: their seeds are not used again.
    #[serde(default)]
    pub earlier: u64,
    /// Confirmations that earlier campaigns began on the judged suite: this one's take the parts of the held-out items in turn after them.
    #[serde(default)]
    pub looks: usize,
}

impl Started {
    /// Seed of the i-th screening run against the incumbent of round `since`. Seeds of other rounds, uses, campaigns of the workspace and
    /// campaign seeds are others.
    pub fn screening_seed(&self, since: u32, i: usize) -> u64 {
        let campaign = self.earlier * 1_000_000_000_000 + self.seed.wrapping_mul(1_000_000);
        campaign.wrapping_add(u64::from(since) * 100 + i as u64)
    }

    /// Seed of the i-th run of a confirmation in `round`; the closing counts as one.
    pub fn confirmation_seed(&self, round: u32, i: usize) -> u64 {
        self.screening_seed(round, 50 + i)
    }
}

/// How a run or an evaluation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "kebab-case")]
pub enum Status {
    /// It gave what it should.
    Done,
    /// The candidate is at fault.
    Invalid {
        /// In a sentence.
        reason: String,
    },
    /// A limit or the budget ended it.
    Incomplete {
        /// In a sentence.
        reason: String,
    },
}

/// What may differ between two executions of the same run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Took {
    /// Wall time in seconds.
    pub wall_s: f64,
    /// Most memory, in bytes.
    #[serde(default)]
    pub peak_rss: u64,
    /// What it said last, where it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<String>,
}

/// A training run of one commit with one seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// What was run.
    #[serde(flatten)]
    pub subject: Subject,
    /// Its seed.
    pub seed: u64,
    /// How it ended.
    #[serde(flatten)]
    pub status: Status,
    /// What it left, where it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<Left>,
    /// Time and words.
    pub volatile: Took,
}

/// What a finished training run left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Left {
    /// The checkpoint, relative to the run's folder.
    pub checkpoint: String,
    /// Hash of its content.
    pub hash: String,
    /// Steps.
    pub steps: u64,
    /// Counted tokens.
    pub tokens: u64,
    /// Counted floating-point operations.
    pub flops: f64,
}

/// A checkpoint measured on a subset of the suites' items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// What was run.
    #[serde(flatten)]
    pub subject: Subject,
    /// Its seed.
    pub seed: u64,
    /// Which items.
    pub subset: Subset,
    /// How it ended.
    #[serde(flatten)]
    pub status: Status,
    /// By [`score_key`].
    pub scores: BTreeMap<String, f64>,
    /// The reports behind the scores, one a suite.
    pub reports: Vec<ReportRef>,
    /// Time and words.
    pub volatile: Took,
}

/// Where a report lies and what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportRef {
    /// The suite.
    pub suite: String,
    /// Path in the campaign's folder.
    pub path: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Hash of the fingerprint.
    pub fingerprint: String,
}

/// How a metric of a suite is called among scores: suites may share names.
pub fn score_key(suite: &str, metric: &str) -> String {
    format!("{suite}#{metric}")
}

/// What a round starts from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observed {
    /// What must be beaten.
    pub incumbent: Incumbent,
    /// People's notes so far, oldest first.
    pub notes: Vec<String>,
}

/// What is known of a recipe without running it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecipeFacts {
    /// Floating-point operations that a run will count, where they can be told.
    pub flops: Option<f64>,
    /// Tokens that a run will count, where they can be told.
    pub tokens: Option<u64>,
    /// Parameters of the model.
    pub params: Option<u64>,
}

/// Whether a proposal becomes a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// It does.
    Admitted(Admitted),
    /// It does not, and cost no run.
    Refused(Refusal),
}

/// An admitted proposal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Admitted {
    /// All that really differs from the incumbent, declared or not.
    pub changes: Vec<Change>,
    /// [`crate::edit::fingerprint`] of the changes.
    pub fingerprint: String,
    /// What a run will take.
    pub facts: RecipeFacts,
    /// What a reviewer should know.
    pub flags: Vec<String>,
}

/// A refused proposal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Its class.
    pub reason: Reason,
    /// In a sentence.
    pub message: String,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Why a proposal is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// It lacks a hypothesis or a finite forecast.
    Incomplete,
    /// It edits what the goal does not open.
    Scope,
    /// It is too large.
    Size,
    /// Its edits cannot be applied.
    Edits,
    /// Nothing that matters would differ.
    NoChange,
    /// Only seeds would differ, and those are the harness's.
    SeedOnly,
    /// It changes the run's compute, which is the harness's.
    Compute,
    /// It would train on what judges it, or begin from what is not the workspace's.
    Source,
    /// The recipe cannot be used.
    Recipe,
    /// It was tried before.
    Repeat,
}

/// What screening says, and which confirmation follows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Screened {
    /// The judge's word; a run that failed ends screening, too.
    pub screen: Screen,
    /// Where it is promising.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirmation: Option<Confirmation>,
}

/// A confirmation's place among the campaign's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Confirmation {
    /// From 1.
    pub index: usize,
    /// The held-out items it uses.
    pub subset: Subset,
    /// How many confirmations have used these items, this one included.
    pub looks: usize,
    /// The level it may spend.
    pub alpha: f64,
}

/// The verdict on a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ruling {
    /// The verdict.
    pub verdict: Verdict,
    /// The numbers in a sentence.
    pub reason: String,
    /// What screening estimated.
    pub screening: Option<Estimate>,
    /// What confirmation estimated.
    pub confirmation: Option<Estimate>,
    /// Its one-sided p-value.
    pub p: Option<f64>,
    /// The level that it was compared with.
    pub level: Option<f64>,
    /// The other metrics that may not fall, by [`score_key`].
    pub floors: BTreeMap<String, Option<Floor>>,
    /// What a reviewer should know.
    pub flags: Vec<String>,
}

impl Ruling {
    /// A verdict without a confirmation.
    pub fn early(verdict: Verdict, reason: impl Into<String>, screening: Option<Estimate>) -> Self {
        Self {
            verdict,
            reason: reason.into(),
            screening,
            confirmation: None,
            p: None,
            level: None,
            floors: BTreeMap::new(),
            flags: Vec::new(),
        }
    }

    /// The confirmation's estimate where there is one, else the screening's.
    pub fn estimate(&self) -> Option<&Estimate> {
        self.confirmation.as_ref().or(self.screening.as_ref())
    }
}

/// A review item: bound to a commit, which cannot change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// The candidate's commit.
    pub commit: String,
    /// What is claimed, with its numbers.
    pub claim: String,
}

/// What the goal's policy made of a verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The incumbent from now on, where it is kept provisionally.
    pub head: Option<Incumbent>,
    /// Why.
    pub reason: String,
}

/// A person's decision. Its kind is the decision's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// Keep, rollback or iterate.
    pub decision: Decision,
    /// The commit that was decided on.
    pub commit: String,
    /// The incumbent from now on, where it changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<Incumbent>,
    /// The person's note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The end of a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    /// Predicted less estimated effect, where both are known.
    pub forecast_error: Option<f64>,
    /// In a sentence.
    pub lesson: String,
    /// Time at work.
    pub volatile: Took,
}

/// What was kept, all together, against the baseline: on seeds and items that no decision saw.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Closed {
    /// The kept head.
    pub head: String,
    /// The items.
    pub subset: Subset,
    /// The kept head's scores, by seed.
    pub kept: Vec<f64>,
    /// The baseline's.
    pub baseline: Vec<f64>,
    /// Kept less baseline with its 95% interval; absent where fewer than two seeds gave both scores.
    pub total: Option<Estimate>,
    /// Time at work.
    pub volatile: Took,
}

/// The end of a campaign.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// [`Ended::ROUNDS`], [`Ended::STOPPED`], or the budget that was reached.
    pub reason: String,
}

impl Ended {
    /// All rounds were made.
    pub const ROUNDS: &str = "rounds";
    /// A person asked.
    pub const STOPPED: &str = "stopped";
}
