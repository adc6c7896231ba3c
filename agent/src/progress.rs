//! What a campaign tells whoever watches it live. The ledger is the record; this is for the eye.

use crate::judge::Verdict;
use hone_runs::Failure;
use std::path::Path;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress<'a> {
    /// A training run starts or is waited for; `step` is the step it belongs to.
    RunStarted {
        /// The round; 0 for the baseline.
        round: u32,
        /// One of [`crate::record::step`].
        step: &'a str,
        /// The name of what is run: `baseline`, `r017-raise-lr`.
        name: &'a str,
        /// Its seed.
        seed: u64,
        /// Its folder; `metrics.jsonl` there grows.
        folder: &'a Path,
    },
    /// A run is trained and measured, or failed.
    RunFinished {
        /// The round.
        round: u32,
        /// The step.
        step: &'a str,
        /// The name.
        name: &'a str,
        /// The seed.
        seed: u64,
        /// The judged metric.
        score: Option<f64>,
        /// Why there is no score.
        trouble: Option<&'a str>,
    },
    /// The baseline is known.
    Baseline {
        /// Its scores, one a seed.
        scores: &'a [f64],
    },
    /// A round begins.
    RoundStarted {
        /// Its number, from 1.
        round: u32,
        /// Of how many.
        rounds: u32,
    },
    /// A proposal was made.
    Proposed {
        /// The round.
        round: u32,
        /// Its title.
        title: &'a str,
        /// Its hypothesis.
        hypothesis: &'a str,
    },
    /// There is no candidate in this round.
    Refused {
        /// The round.
        round: u32,
        /// Why.
        reason: &'a str,
    },
    /// A verdict.
    Verdict {
        /// The round.
        round: u32,
        /// The verdict.
        verdict: Verdict,
        /// The numbers in a sentence.
        reason: &'a str,
    },
    /// The policy kept a candidate provisionally.
    Kept {
        /// The round.
        round: u32,
        /// The commit.
        commit: &'a str,
    },
    /// What was kept is measured against the baseline.
    Closing {
        /// Runs to come.
        runs: usize,
    },
    /// A run failed for reasons that are not its own, and is tried again.
    Retrying {
        /// The name.
        name: &'a str,
        /// The seed.
        seed: u64,
        /// What happened.
        failure: &'a Failure,
    },
    /// Something a person should know.
    Note(&'a str),
}

/// Watches a campaign.
pub trait Observer: Send + Sync {
    /// Called as things happen, from any thread.
    fn see(&self, progress: &Progress<'_>);
}

/// Nobody watches.
impl Observer for () {
    fn see(&self, _: &Progress<'_>) {}
}
