//! A campaign as its events tell it: rounds, runs, what is kept, what was spent. A pure fold over the ledger; the driver, the review queue
//! and the status all read it, and none keeps a state beside it.

use crate::branch::Candidate;
use crate::judge::{Noise, Verdict};
use crate::proposal::{Decision, Proposed, Usage};
use crate::record::{
    Admission, Admitted, Closed, Decided, Ended, Incumbent, Learned, Measured, Observed, Policy, Queued, Record,
    ReportRef, Ruling, Screened, Started, Status, Subject, Trained, score_key, step,
};
use hone_evals::suite::Subset;
use hone_runs::ledger::{Event, Ledger};
use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::{BTreeMap, BTreeSet};

/// One round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Round {
    /// What it started from.
    pub observed: Option<Observed>,
    /// What was proposed, or why nothing was.
    pub proposed: Option<Proposed>,
    /// Whether it was admitted.
    pub admission: Option<Admission>,
    /// The candidate.
    pub candidate: Option<Candidate>,
    /// What screening said.
    pub screened: Option<Screened>,
    /// The verdict.
    pub ruling: Option<Ruling>,
    /// The review item.
    pub queued: Option<Queued>,
    /// The policy's word.
    pub policy: Option<Policy>,
    /// People's decisions, oldest first.
    pub decisions: Vec<Decided>,
    /// The end.
    pub learned: Option<Learned>,
    /// What its runs cost.
    pub cost: Cost,
}

impl Round {
    /// What was admitted.
    pub fn admitted(&self) -> Option<&Admitted> {
        match &self.admission {
            Some(Admission::Admitted(admitted)) => Some(admitted),
            _ => None,
        }
    }

    /// Why there is no candidate.
    pub fn refusal(&self) -> Option<String> {
        match (&self.proposed, &self.admission) {
            (Some(Proposed { answer: Err(failure), .. }), _) => Some(failure.message.clone()),
            (_, Some(Admission::Refused(refusal))) => Some(refusal.message.clone()),
            _ => None,
        }
    }

    /// The budget that the proposer's next call did not fit, where that is why the round has no candidate.
    pub(crate) fn used_up(&self) -> Option<&'static str> {
        let failure = self.proposed.as_ref()?.answer.as_ref().err().filter(|f| f.class == Class::Budget)?;
        Some(hone_evals::meter::named_budget(failure).unwrap_or("budget"))
    }

    /// The last word of a person, else the policy's.
    pub fn decision(&self) -> Option<Decision> {
        let policy = self.policy.as_ref().and_then(|p| p.head.as_ref()).map(|_| Decision::Keep);
        self.decisions.last().map(|d| d.decision).or(policy)
    }
}

/// What was spent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Training runs.
    pub runs: usize,
    /// Counted tokens of training.
    pub tokens: u64,
    /// Counted floating-point operations of training.
    pub flops: f64,
    /// Seconds of a device, evaluation included.
    pub device_s: f64,
    /// Seconds at work, as far as rounds are done.
    pub wall_s: f64,
    /// Tokens of models that propose.
    pub model_tokens: u64,
    /// Dollars for them; what had no price is not in it.
    pub usd: f64,
    /// Replies of models without a known price: not free, and in no sum of dollars.
    #[serde(default)]
    pub unpriced_calls: u64,
    /// Their tokens, which are among `model_tokens`.
    #[serde(default)]
    pub unpriced_tokens: u64,
}

impl Cost {
    fn train(&mut self, trained: &Trained) {
        self.runs += 1;
        self.device_s += trained.volatile.wall_s;
        if let Some(left) = &trained.left {
            self.tokens += left.tokens;
            self.flops += left.flops;
        }
    }

    fn propose(&mut self, usage: &Usage) {
        let tokens = usage.prompt_tokens + usage.completion_tokens;
        self.model_tokens += tokens;
        match usage.usd {
            Some(usd) => self.usd += usd,
            None => {
                self.unpriced_calls += u64::from(usage.calls);
                self.unpriced_tokens += tokens;
            }
        }
    }
}

/// A score of one commit with one seed on one subset, as far as there is one.
#[derive(Clone, Debug, PartialEq)]
pub enum Score {
    /// A number.
    Is(f64),
    /// The run or the score is invalid.
    Invalid(String),
    /// The run was cut short.
    Incomplete(String),
}

/// The fold.
#[derive(Clone, Debug)]
pub struct History {
    /// The campaign's name.
    pub name: String,
    /// How it began.
    pub started: Started,
    /// Rounds by number; 0 and the closing's are not among them.
    pub rounds: BTreeMap<u32, Round>,
    /// The rounds that are kept, in the order of their keeping.
    pub kept: Vec<u32>,
    /// Kept rounds that were measured together with a change that was rolled back since, until a person confirms them.
    pub shaken: BTreeSet<u32>,
    /// What must be beaten now.
    pub head: Incumbent,
    /// Every commit that was the incumbent.
    pub heads: Vec<String>,
    /// The closing.
    pub closed: Option<Closed>,
    /// The end.
    pub ended: Option<Ended>,
    /// The last request or pause: `pause`, `resume`, `stop`, `paused`, and its reason.
    pub control: Option<(String, Option<Failure>)>,
    /// What everything cost.
    pub cost: Cost,
    /// When the last event was appended, in milliseconds since the Unix epoch.
    pub at: i64,
    position: i64,
    controls: i64,
    trained: BTreeMap<(String, u64), Trained>,
    measured: BTreeMap<(String, u64, String), Measured>,
    keys: BTreeMap<(u32, String, i64, String), serde_json::Value>,
}

impl History {
    /// Reads a campaign from the ledger.
    ///
    /// # Errors
    /// `Usage` when there is no such campaign, else as the ledger's.
    pub async fn load(ledger: &Ledger, campaign: &str) -> Result<Self> {
        let events = ledger.events(campaign).await?;
        if events.is_empty() {
            let known = ledger.campaigns().await?;
            let hint = match hone_runs::config::nearest(campaign, known.iter().map(String::as_str)) {
                Some(near) => format!("Did you mean {near}?"),
                None if known.is_empty() => "There is none yet; `hone campaign run GOAL` starts one.".into(),
                None => format!("There are: {}.", known.join(", ")),
            };
            return Err(Failure::new(Class::Usage, format!("There is no campaign {campaign}.")).hint(hint));
        }
        Self::of(&events)
    }

    /// Folds events, the first of which is the start.
    ///
    /// # Errors
    /// `Integrity` when an event is not what its kind says.
    pub fn of(events: &[Event]) -> Result<Self> {
        let first = events.first().filter(|e| e.kind == Started::KIND);
        let first =
            first.ok_or_else(|| Failure::new(Class::Integrity, "The campaign's first event is not its start."))?;
        let started: Started = read(first)?;
        let baseline = Subject { commit: started.trusted.clone(), name: "baseline".into() };
        let mut history = Self {
            name: first.campaign.clone(),
            heads: vec![started.trusted.clone()],
            head: Incumbent { subject: baseline, since: 0 },
            started,
            rounds: BTreeMap::new(),
            kept: Vec::new(),
            shaken: BTreeSet::new(),
            closed: None,
            ended: None,
            control: None,
            cost: Cost::default(),
            at: 0,
            position: 0,
            controls: 0,
            trained: BTreeMap::new(),
            measured: BTreeMap::new(),
            keys: BTreeMap::new(),
        };
        events.iter().try_for_each(|event| history.add(event))?;
        Ok(history)
    }

    /// Takes in the events that were appended since.
    ///
    /// # Errors
    /// As [`History::of`] and the ledger's.
    pub async fn sync(&mut self, ledger: &Ledger) -> Result<()> {
        let events = ledger.events_after(&self.name, self.position).await?;
        events.iter().try_for_each(|event| self.add(event))
    }

    /// Where the fold has come to in the campaign's chain.
    pub fn position(&self) -> i64 {
        self.position
    }

    /// The next free number for a control event.
    pub(crate) fn next_control(&self) -> i64 {
        self.controls
    }

    /// The stored payload of a key.
    pub(crate) fn stored<T: Record>(&self, round: u32, step: &str, replicate: i64) -> Result<Option<T>> {
        let key = (round, step.to_string(), replicate, T::KIND.to_string());
        self.keys.get(&key).map(|payload| decode(payload, T::KIND)).transpose()
    }

    /// Takes in one event; events must come in the order of their positions, and one that is known already is passed over.
    ///
    /// # Errors
    /// `Integrity` when it is not what its kind says.
    pub fn add(&mut self, event: &Event) -> Result<()> {
        if event.position <= self.position {
            return Ok(());
        }
        self.position = event.position;
        self.at = event.at;
        if event.step == step::CONTROL {
            self.controls = self.controls.max(event.replicate + 1);
            let failure = event.payload["volatile"]["failure"].clone();
            self.control = Some((event.kind.clone(), serde_json::from_value(failure).ok()));
            return Ok(());
        }
        let key = (event.round, event.step.clone(), event.replicate, event.kind.clone());
        self.keys.insert(key, event.payload.clone());
        let number = event.round;
        match event.kind.as_str() {
            Trained::KIND => {
                let trained: Trained = read(event)?;
                self.cost.train(&trained);
                self.round_if(number).map(|round| round.cost.train(&trained)).unwrap_or_default();
                self.trained.insert((trained.subject.commit.clone(), trained.seed), trained);
            }
            Measured::KIND => {
                let measured: Measured = read(event)?;
                self.cost.device_s += measured.volatile.wall_s;
                self.round_if(number).map(|round| round.cost.device_s += measured.volatile.wall_s).unwrap_or_default();
                let key = (measured.subject.commit.clone(), measured.seed, measured.subset.to_string());
                self.measured.insert(key, measured);
            }
            Observed::KIND => self.round(number).observed = Some(read(event)?),
            Proposed::KIND => {
                let proposed: Proposed = read(event)?;
                self.cost.propose(&proposed.usage);
                let round = self.round(number);
                round.cost.propose(&proposed.usage);
                round.proposed = Some(proposed);
            }
            Admission::KIND => self.round(number).admission = Some(read(event)?),
            Candidate::KIND => self.round(number).candidate = Some(read(event)?),
            Screened::KIND => self.round(number).screened = Some(read(event)?),
            Ruling::KIND => self.round(number).ruling = Some(read(event)?),
            Queued::KIND => self.round(number).queued = Some(read(event)?),
            Policy::KIND => {
                let policy: Policy = read(event)?;
                if let Some(head) = &policy.head {
                    self.keep(number, head);
                }
                self.round(number).policy = Some(policy);
            }
            "keep" | "rollback" | "iterate" => {
                let decided: Decided = read(event)?;
                match (decided.decision, &decided.head) {
                    (Decision::Keep, head) => {
                        self.shaken.remove(&number);
                        head.iter().for_each(|head| self.keep(number, head));
                    }
                    (Decision::Rollback, Some(head)) => {
                        let later = self.kept.iter().skip_while(|kept| **kept != number).skip(1);
                        self.shaken.extend(later);
                        self.shaken.remove(&number);
                        self.kept.retain(|kept| *kept != number);
                        self.set_head(head);
                    }
                    _ => {}
                }
                self.round(number).decisions.push(decided);
            }
            Learned::KIND => {
                let learned: Learned = read(event)?;
                self.cost.wall_s += learned.volatile.wall_s;
                let round = self.round(number);
                round.cost.wall_s = learned.volatile.wall_s;
                round.learned = Some(learned);
            }
            Closed::KIND => {
                let closed: Closed = read(event)?;
                self.cost.wall_s += closed.volatile.wall_s;
                self.closed = Some(closed);
            }
            Ended::KIND => self.ended = Some(read(event)?),
            // Kinds of a newer Hone are kept in the ledger and passed over here.
            _ => {}
        }
        Ok(())
    }

    fn round(&mut self, number: u32) -> &mut Round {
        self.rounds.entry(number).or_default()
    }

    /// The round, where the event belongs to one and not to baseline or closing.
    fn round_if(&mut self, number: u32) -> Option<&mut Round> {
        self.rounds.get_mut(&number)
    }

    fn keep(&mut self, number: u32, head: &Incumbent) {
        if !self.kept.contains(&number) {
            self.kept.push(number);
        }
        self.set_head(head);
    }

    fn set_head(&mut self, head: &Incumbent) {
        self.head = head.clone();
        if !self.heads.contains(&head.subject.commit) {
            self.heads.push(head.subject.commit.clone());
        }
    }

    /// The baseline.
    pub fn baseline(&self) -> Incumbent {
        let subject = Subject { commit: self.started.trusted.clone(), name: "baseline".into() };
        Incumbent { subject, since: 0 }
    }

    /// Whether a commit is what was there before the campaign.
    pub fn is_baseline(&self, commit: &str) -> bool {
        commit == self.started.trusted
    }

    /// The training run of a commit with a seed.
    pub fn trained(&self, commit: &str, seed: u64) -> Option<&Trained> {
        self.trained.get(&(commit.to_string(), seed))
    }

    /// The training runs of a commit.
    pub fn runs(&self, commit: &str) -> impl Iterator<Item = &Trained> {
        self.trained.values().filter(move |run| run.subject.commit == commit)
    }

    /// The measurement of a commit with a seed on a subset.
    pub fn measured(&self, commit: &str, seed: u64, subset: &Subset) -> Option<&Measured> {
        self.measured.get(&(commit.to_string(), seed, subset.to_string()))
    }

    /// A score, or why there is none; None where it was not run yet.
    pub fn score(&self, commit: &str, seed: u64, subset: &Subset, key: &str) -> Option<Score> {
        let of = |status: &Status| match status {
            Status::Done => None,
            Status::Invalid { reason } => Some(Score::Invalid(reason.clone())),
            Status::Incomplete { reason } => Some(Score::Incomplete(reason.clone())),
        };
        let trained = self.trained(commit, seed)?;
        if let Some(failed) = of(&trained.status) {
            return Some(failed);
        }
        let measured = self.measured(commit, seed, subset)?;
        Some(of(&measured.status).unwrap_or_else(|| match measured.scores.get(key) {
            Some(score) => Score::Is(*score),
            None => Score::Invalid(format!("There is no finite {} with seed {seed}.", key.replace('#', " "))),
        }))
    }

    /// Results of training and evaluation that were recorded in a round.
    pub(crate) fn made(&self, round: u32) -> usize {
        let is_result = |kind: &str| [Trained::KIND, Measured::KIND].contains(&kind);
        self.keys.keys().filter(|(of, _, _, kind)| *of == round && is_result(kind)).count()
    }

    /// The reports behind a commit's scores.
    pub fn reports(&self, commit: &str) -> impl Iterator<Item = &ReportRef> {
        self.measured.values().filter(move |m| m.subject.commit == commit).flat_map(|m| &m.reports)
    }

    /// The judged metric among scores.
    pub fn metric_key(&self) -> String {
        score_key(&self.started.goal.metric.suite, &self.started.goal.metric.name)
    }

    /// The finite dev scores of an incumbent on its first screening seeds.
    pub fn screening_scores(&self, incumbent: &Incumbent) -> Vec<f64> {
        self.screened(incumbent).map(|(_, score)| score).collect()
    }

    /// The screening seed with the incumbent's middle score (the lower of two): the run that shows how the incumbent usually trains.
    pub(crate) fn middle_seed(&self, incumbent: &Incumbent) -> u64 {
        let mut screened: Vec<(u64, f64)> = self.screened(incumbent).collect();
        screened.sort_by(|a, b| a.1.total_cmp(&b.1));
        let middle = screened.get(screened.len().saturating_sub(1) / 2);
        middle.map_or_else(|| self.started.screening_seed(incumbent.since, 0), |(seed, _)| *seed)
    }

    /// The first screening seeds with their finite dev scores.
    fn screened(&self, incumbent: &Incumbent) -> impl Iterator<Item = (u64, f64)> {
        let seeds =
            (0..self.started.goal.runs.replicates.fewest).map(|i| self.started.screening_seed(incumbent.since, i));
        let key = self.metric_key();
        seeds.filter_map(move |seed| match self.score(&incumbent.subject.commit, seed, &Subset::DEV, &key) {
            Some(Score::Is(score)) => Some((seed, score)),
            _ => None,
        })
    }

    /// How much runs of one commit differ, as rounds up to `round` found: the replicates of each incumbent on its screening seeds, and those
    /// of each earlier confirmation's incumbent. Groups of their own: they were measured on other items.
    pub fn noise(&self, round: u32) -> Noise {
        let mut incumbents = vec![self.baseline()];
        for (_, earlier) in self.rounds.range(..=round) {
            if let Some(observed) = earlier.observed.as_ref().filter(|o| !incumbents.contains(&o.incumbent)) {
                incumbents.push(observed.incumbent.clone());
            }
        }
        let screened = incumbents.iter().map(|incumbent| self.screening_scores(incumbent));
        let confirmed = self.rounds.range(..round).map(|(number, earlier)| self.confirmed_incumbent(*number, earlier));
        let groups: Vec<Vec<f64>> = screened.chain(confirmed).collect();
        Noise::of(groups.iter().map(Vec::as_slice))
    }

    /// The incumbent's scores that a round's confirmation rests on: as many as its estimate counts, not what was run beyond to fill the
    /// machine. None where nothing was confirmed.
    fn confirmed_incumbent(&self, number: u32, round: &Round) -> Vec<f64> {
        let confirmation = round.screened.as_ref().and_then(|s| s.confirmation);
        let estimate = round.ruling.as_ref().and_then(|r| r.confirmation);
        let (Some(confirmation), Some(estimate), Some(observed)) = (confirmation, estimate, &round.observed) else {
            return Vec::new();
        };
        let (commit, key) = (&observed.incumbent.subject.commit, self.metric_key());
        let score = |seed| match self.score(commit, seed, &confirmation.subset, &key) {
            Some(Score::Is(score)) => Some(score),
            _ => None,
        };
        (0..estimate.n).filter_map(|i| score(self.started.confirmation_seed(number, i))).collect()
    }

    /// Counted operations of the dearest baseline run: what every later run may spend.
    pub fn compute(&self) -> Option<f64> {
        let seeds = (0..self.started.goal.runs.replicates.fewest).map(|i| self.started.screening_seed(0, i));
        let spent = seeds.filter_map(|seed| Some(self.trained(&self.started.trusted, seed)?.left.as_ref()?.flops));
        spent.max_by(f64::total_cmp).filter(|flops| *flops > 0.0)
    }

    /// Confirmations that rounds before `round` began, and how many of them ended better.
    pub fn confirmations(&self, round: u32) -> (usize, usize) {
        let before = || self.rounds.range(..round).map(|(_, r)| r);
        let begun = before().filter(|r| r.screened.as_ref().is_some_and(|s| s.confirmation.is_some())).count();
        let better = before().filter(|r| r.ruling.as_ref().is_some_and(|r| r.verdict == Verdict::Better)).count();
        (begun, better)
    }

    /// People's notes, in the order of the rounds that they are on.
    pub fn notes(&self) -> Vec<String> {
        let decisions = self.rounds.iter().flat_map(|(n, round)| round.decisions.iter().map(move |d| (n, d)));
        let note = |(n, d): (&u32, &Decided)| d.note.as_ref().map(|note| format!("On round {n}: {note}"));
        decisions.filter_map(note).collect()
    }
}

fn read<T: DeserializeOwned>(event: &Event) -> Result<T> {
    decode(&event.payload, &event.kind)
        .map_err(|failure| failure.at(format!("event {} of {}", event.position, event.campaign)))
}

fn decode<T: DeserializeOwned>(payload: &serde_json::Value, kind: &str) -> Result<T> {
    T::deserialize(payload).map_err(|e| {
        Failure::new(Class::Integrity, format!("A `{kind}` event cannot be read: {e}."))
            .hint("The ledger was written by another version of Hone; use that one for this campaign.")
    })
}
