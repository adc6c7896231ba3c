//! Where a campaign stands, in plain structs for tables and `--json`. Read from the ledger alone, besides whether a driver is alive.

use crate::edit::Change;
use crate::goal::{Budget, Metric};
use crate::history::{Cost, History, Round, Score};
use crate::judge::{Estimate, Verdict};
use crate::proposal::Decision;
use crate::record::{Closed, Ended, Incumbent, Subject};
use crate::review::{self, Item};
use crate::workspace::Workspace;
use hone_evals::stats;
use hone_evals::suite::Subset;
use hone_runs::ledger::Ledger;
use hone_runs::{Failure, Result};
use serde::Serialize;
use serde_json::Value;

/// What a campaign is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// A driver is at work.
    Running,
    /// Paused; `hone campaign resume` goes on.
    Paused,
    /// Its driver died; `hone campaign resume` goes on.
    Interrupted,
    /// Over.
    Over,
}

/// Scores of one commit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scores {
    /// One a seed.
    pub scores: Vec<f64>,
    /// Their mean.
    pub mean: Option<f64>,
    /// 95% interval of the mean.
    pub interval: Option<[f64; 2]>,
}

/// One round of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The round.
    pub round: u32,
    /// The proposal's title.
    pub title: String,
    /// Its hypothesis.
    pub hypothesis: String,
    /// What differs: `optimizer.lr 0.001 → 0.002`.
    pub change: String,
    /// The candidate's mean score where it was decided: confirmation, else screening.
    pub score: Option<f64>,
    /// The incumbent's on the same seeds and items.
    pub incumbent: Option<f64>,
    /// Candidate less incumbent, with its interval.
    pub effect: Option<Estimate>,
    /// The verdict; None while open and where there was no candidate.
    pub verdict: Option<Verdict>,
    /// The numbers in a sentence, or why there was no candidate.
    pub reason: Option<String>,
    /// What was decided.
    pub decision: Option<Decision>,
    /// Whether it is part of what is kept now.
    pub kept: bool,
    /// What it cost.
    pub cost: Cost,
}

/// Where a campaign stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overview {
    /// Its name.
    pub campaign: String,
    /// The goal's sentence.
    pub goal: String,
    /// The metric.
    pub metric: Metric,
    /// What it is doing.
    pub state: State,
    /// Why it ended or paused, where it did.
    pub reason: Option<String>,
    /// What made it pause.
    pub failure: Option<Failure>,
    /// The commit it began from.
    pub trusted: String,
    /// The baseline on the screening seeds.
    pub baseline: Scores,
    /// What must be beaten now.
    pub incumbent: Incumbent,
    /// The rounds that are kept, in order.
    pub kept: Vec<u32>,
    /// Confirmations begun, each a look at held-out items.
    pub confirmations: usize,
    /// The rounds.
    pub rounds: Vec<Row>,
    /// The review queue, open items first.
    pub queue: Vec<Item>,
    /// What it cost.
    pub cost: Cost,
    /// What it may cost.
    pub budget: Budget,
    /// What was kept, all together, against the baseline.
    pub closed: Option<Closed>,
    /// The last event, in milliseconds since the Unix epoch.
    pub at: i64,
}

/// Where the campaign `name` stands.
///
/// # Errors
/// `Usage` when there is none of that name.
pub async fn overview(workspace: &Workspace, ledger: &Ledger, name: &str) -> Result<Overview> {
    let history = History::load(ledger, name).await?;
    let running = workspace.is_locked(name)?;
    Ok(Overview::of(&history, running))
}

impl Overview {
    /// From a history, and whether a driver holds the campaign's lock.
    pub fn of(history: &History, running: bool) -> Self {
        let started = &history.started;
        let (state, failure) = match (&history.ended, &history.control) {
            (Some(_), _) => (State::Over, None),
            (None, _) if running => (State::Running, None),
            (None, Some((kind, failure))) if kind == "paused" || kind == "pause" => (State::Paused, failure.clone()),
            _ => (State::Interrupted, None),
        };
        let reason = history.ended.as_ref().map(|e| e.reason.clone()).or(failure.as_ref().map(|f| f.message.clone()));
        Self {
            campaign: history.name.clone(),
            goal: started.goal.goal.clone(),
            metric: started.goal.metric.clone(),
            state,
            reason,
            failure,
            trusted: started.trusted.clone(),
            baseline: scores(history.screening_scores(&history.baseline())),
            incumbent: history.head.clone(),
            kept: history.kept.clone(),
            confirmations: history.confirmations(u32::MAX).0,
            rounds: history.rounds.iter().map(|(number, round)| row(history, *number, round)).collect(),
            queue: review::items(history),
            cost: history.cost,
            budget: started.goal.budget.clone(),
            closed: history.closed.clone(),
            at: history.at,
        }
    }

    /// The budget that ended it, where neither its last round nor a person did.
    pub fn over_budget(&self) -> Option<&str> {
        let reason = self.reason.as_deref().filter(|_| self.state == State::Over)?;
        (reason != Ended::ROUNDS && reason != Ended::STOPPED).then_some(reason)
    }
}

fn scores(scores: Vec<f64>) -> Scores {
    let mean = (!scores.is_empty()).then(|| scores.iter().sum::<f64>() / scores.len() as f64);
    let interval = stats::t_mean(&scores, 0.95).ok().map(|e| [e.interval.low, e.interval.high]);
    Scores { scores, mean, interval }
}

fn row(history: &History, number: u32, round: &Round) -> Row {
    let proposal = round.proposed.as_ref().and_then(|p| p.answer.as_ref().ok());
    let ruling = round.ruling.as_ref();
    let (score, incumbent) = means(history, number, round).unzip();
    Row {
        round: number,
        title: proposal.map(|p| p.title.clone()).unwrap_or_default(),
        hypothesis: proposal.map(|p| p.hypothesis.clone()).unwrap_or_default(),
        change: round.admitted().map(|a| summary(&a.changes)).unwrap_or_default(),
        score,
        incumbent,
        effect: ruling.and_then(|r| r.estimate().copied()),
        verdict: ruling.map(|r| r.verdict),
        reason: ruling.map(|r| r.reason.clone()).or(round.refusal()),
        decision: round.decision(),
        kept: history.kept.contains(&number),
        cost: round.cost,
    }
}

/// Mean scores of candidate and incumbent over the seeds that decided.
fn means(history: &History, number: u32, round: &Round) -> Option<(f64, f64)> {
    let (candidate, observed) = (round.candidate.as_ref()?, round.observed.as_ref()?);
    let ruling = round.ruling.as_ref()?;
    let estimate = ruling.estimate()?;
    let confirmed = ruling.confirmation.and(round.screened.as_ref()?.confirmation);
    let key = history.metric_key();
    let mean = |subject: &str| {
        let scores: Option<Vec<f64>> = (0..estimate.n)
            .map(|i| {
                let (seed, subset) = match confirmed {
                    Some(confirmation) => (history.started.confirmation_seed(number, i), confirmation.subset),
                    None => (history.started.screening_seed(observed.incumbent.since, i), Subset::DEV),
                };
                match history.score(subject, seed, &subset, &key)? {
                    Score::Is(score) => Some(score),
                    _ => None,
                }
            })
            .collect();
        scores.map(|s| s.iter().sum::<f64>() / s.len() as f64)
    };
    let incumbent: &Subject = &observed.incumbent.subject;
    mean(&candidate.commit).zip(mean(&incumbent.commit))
}

/// Changes in a line: the first three, and how many more.
pub fn summary(changes: &[Change]) -> String {
    let show = |value: &Option<Value>| match value {
        None => "none".to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    let one = |change: &Change| match (&change.key, &change.from, &change.to) {
        (Some(key), None, to) => format!("{key} → {}", show(to)),
        (Some(key), from, to) => format!("{key} {} → {}", show(from), show(to)),
        (None, None, _) => format!("{} (new)", change.file),
        (None, _, None) => format!("{} (deleted)", change.file),
        (None, ..) => change.file.clone(),
    };
    let mut line = changes.iter().take(3).map(one).collect::<Vec<_>>().join(", ");
    if changes.len() > 3 {
        line.push_str(&format!(" and {} more", changes.len() - 3));
    }
    line
}
