//! The review queue: what a person may decide on, and what a decision does. Every decision is an event bound to the candidate's commit;
//! the branch `hone/<campaign>/kept` and the incumbent follow from the events. What a candidate is worth is the judge's.
//!
//! Rolling back a kept change takes it out of the kept head by a true revert. Changes that were kept after it stay, since most changes are
//! independent; but they were measured together with it, so their items return to the queue with a flag, and the new head is run again on
//! its own seeds before anything is compared with it. Where they touch the same lines nothing is guessed: the later one goes first.

use crate::branch;
use crate::campaign::{encode, kept_branch};
use crate::edit::Change;
use crate::history::{Cost, History, Round, Score};
use crate::judge::{Estimate, Floor, Pair, Verdict};
use crate::proposal::Decision;
use crate::record::{Decided, Incumbent, ReportRef, Subject, step};
use crate::round::decision_lock;
use crate::run::run_folder;
use crate::workspace::{Workspace, short};
use hone_evals::suite::Subset;
use hone_runs::ledger::{Ledger, NewEvent};
use hone_runs::{Class, Failure, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What became of a review item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Nobody has decided.
    Waiting,
    /// The policy keeps it until a person confirms it or rolls it back.
    Provisional,
    /// A person kept it.
    Kept,
    /// A person rolled it back.
    RolledBack,
    /// A person asked for another try.
    Iterate,
}

/// A review item.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Item {
    /// What commands call it: `c1/r017`.
    pub id: String,
    /// The round.
    pub round: u32,
    /// Whether somebody still has to decide.
    pub open: bool,
    /// What became of it.
    pub state: State,
    /// What is claimed, with its numbers.
    pub claim: String,
    /// The confirmed effect.
    pub effect: Option<Estimate>,
    /// What to look at.
    pub flags: Vec<String>,
    /// The commit that a decision is bound to.
    pub commit: String,
    /// What it was measured against.
    pub parent: String,
    /// Its branch.
    pub branch: String,
    /// What the round cost.
    pub cost: Cost,
}

/// One seed of a comparison, and where to look.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SeedLine {
    /// `screening` or `confirmation`.
    pub stage: &'static str,
    /// The two scores.
    #[serde(flatten)]
    pub pair: Pair,
    /// The candidate's run folder.
    pub folder: PathBuf,
}

/// All there is to see of a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Detail {
    /// The item; None where the round left none.
    pub item: Option<Item>,
    /// The round.
    pub round: u32,
    /// The proposal's title.
    pub title: String,
    /// Its hypothesis.
    pub hypothesis: String,
    /// Who proposed.
    pub source: String,
    /// The predicted effect.
    pub predicted_effect: f64,
    /// The verdict.
    pub verdict: Option<Verdict>,
    /// The numbers in a sentence, or why there is no candidate.
    pub reason: String,
    /// All that differs, declared or not.
    pub changes: Vec<Change>,
    /// The difference of the two trees.
    pub diff: String,
    /// Scores by seed.
    pub seeds: Vec<SeedLine>,
    /// The metrics that may not fall.
    pub floors: BTreeMap<String, Option<Floor>>,
    /// The reports behind the scores.
    pub reports: Vec<ReportRef>,
    /// People's decisions, oldest first.
    pub decisions: Vec<Decided>,
}

/// What a decision did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The decision.
    pub decision: Decision,
    /// False where the same had been decided before: then nothing was done.
    pub fresh: bool,
    /// What must be beaten from now on.
    pub incumbent: Incumbent,
    /// Where the kept branch is; None where nothing was ever kept.
    pub kept_branch: Option<String>,
}

/// Splits `c1/r017`, `r017` or `17` into campaign and round.
///
/// # Errors
/// `Usage` when it is none of these.
pub fn parse_id(id: &str) -> Result<(Option<&str>, u32)> {
    let (campaign, round) = id.rsplit_once('/').map_or((None, id), |(campaign, round)| (Some(campaign), round));
    let digits = round.strip_prefix('r').unwrap_or(round).split('-').next().unwrap_or_default();
    match digits.parse() {
        Ok(round) => Ok((campaign, round)),
        Err(_) => Err(Failure::new(Class::Usage, format!("`{id}` is not the name of a review item."))
            .hint("Items are called like c1/r017; `hone review list` shows them.")),
    }
}

/// The items of a campaign: open ones first, and of these what is in force already and what carries flags.
pub fn items(history: &History) -> Vec<Item> {
    let mut items: Vec<Item> = history.rounds.iter().filter_map(|(n, round)| item(history, *n, round)).collect();
    let calm = |item: &Item| (!item.open, item.state != State::Provisional, item.flags.is_empty(), item.round);
    items.sort_by_key(calm);
    items
}

fn item(history: &History, number: u32, round: &Round) -> Option<Item> {
    let (queued, candidate) = (round.queued.as_ref()?, round.candidate.as_ref()?);
    let kept = history.kept.contains(&number);
    let confirmed = round.decisions.iter().any(|d| d.decision == Decision::Keep);
    let state = match round.decisions.last().map(|d| d.decision) {
        _ if kept && confirmed => State::Kept,
        _ if kept => State::Provisional,
        Some(Decision::Rollback) => State::RolledBack,
        Some(_) => State::Iterate,
        None => State::Waiting,
    };
    let mut flags = round.ruling.as_ref().map(|r| r.flags.clone()).unwrap_or_default();
    let shaken = history.shaken.contains(&number);
    if shaken {
        flags.push("measured together with a change that was rolled back since".into());
    }
    if !kept && state == State::Waiting && candidate.parent != history.head.subject.commit {
        flags.push("measured against an earlier incumbent".into());
    }
    Some(Item {
        id: format!("{}/r{number:03}", history.name),
        round: number,
        open: matches!(state, State::Waiting | State::Provisional) || shaken,
        state,
        claim: queued.claim.clone(),
        effect: round.ruling.as_ref().and_then(|r| r.estimate().copied()),
        flags,
        commit: queued.commit.clone(),
        parent: candidate.parent.clone(),
        branch: candidate.branch.clone(),
        cost: round.cost,
    })
}

/// All there is to see of a round, queued or not.
///
/// # Errors
/// `Usage` when the round is not there or has no proposal yet.
pub fn detail(workspace: &Workspace, history: &History, number: u32) -> Result<Detail> {
    let round = round_of(history, number)?;
    let proposal = round.proposed.as_ref().and_then(|p| p.answer.as_ref().ok());
    let ruling = round.ruling.as_ref();
    let (mut seeds, mut reports, mut diff) = (Vec::new(), Vec::new(), String::new());
    if let (Some(candidate), Some(observed)) = (&round.candidate, &round.observed) {
        diff = branch::diff(workspace, &candidate.parent, &candidate.commit)?;
        let subject = Subject { commit: candidate.commit.clone(), name: candidate.name().into() };
        let confirmed = round.screened.as_ref().and_then(|s| s.confirmation).map(|c| c.subset);
        let runs = workspace.runs_path(&history.name);
        for i in 0..history.started.goal.runs.replicates.most {
            let screening =
                ("screening", history.started.screening_seed(observed.incumbent.since, i), Some(Subset::DEV));
            let confirmation = ("confirmation", history.started.confirmation_seed(number, i), confirmed);
            for (stage, seed, subset) in [screening, confirmation] {
                let Some(subset) = subset else { continue };
                let score = |commit: &str| match history.score(commit, seed, &subset, &history.metric_key()) {
                    Some(Score::Is(score)) => Some(score),
                    _ => None,
                };
                if let (Some(candidate), Some(incumbent)) = (score(&subject.commit), score(&candidate.parent)) {
                    let folder = run_folder(&runs, &subject, seed);
                    seeds.push(SeedLine { stage, pair: Pair { seed, candidate, incumbent }, folder });
                }
                reports.extend(
                    history.measured(&subject.commit, seed, &subset).into_iter().flat_map(|m| m.reports.clone()),
                );
            }
        }
        seeds.sort_by_key(|line| (line.stage != "screening", line.pair.seed));
    }
    Ok(Detail {
        item: item(history, number, round),
        round: number,
        title: proposal.map(|p| p.title.clone()).unwrap_or_default(),
        hypothesis: proposal.map(|p| p.hypothesis.clone()).unwrap_or_default(),
        source: proposal.map(|p| p.source.clone()).unwrap_or_default(),
        predicted_effect: proposal.map_or(0.0, |p| p.predicted_effect),
        verdict: ruling.map(|r| r.verdict),
        reason: ruling.map(|r| r.reason.clone()).or(round.refusal()).unwrap_or_else(|| "The round is not over.".into()),
        changes: round.admitted().map(|a| a.changes.clone()).unwrap_or_default(),
        diff,
        seeds,
        floors: ruling.map(|r| r.floors.clone()).unwrap_or_default(),
        reports,
        decisions: round.decisions.clone(),
    })
}

/// Keeps a candidate, or confirms what the policy keeps. It becomes the incumbent.
///
/// # Errors
/// `Usage` when there is nothing to keep or it was measured against another incumbent; `Integrity` when its branch or its evidence is not
/// what was judged.
pub async fn keep(workspace: &Workspace, ledger: &Ledger, campaign: &str, number: u32) -> Result<Outcome> {
    decide(workspace, ledger, campaign, number, Decision::Keep, None, |history, round| {
        let queued = round.queued.as_ref().ok_or_else(|| {
            let verdict = round
                .ruling
                .as_ref()
                .map_or("no verdict".into(), |r| format!("the verdict {:?}", r.verdict).to_lowercase());
            usage(format!("Round {number} cannot be kept: it has {verdict}, and only a confirmed improvement can."))
                .hint("`hone review iterate` sends a note to the next proposal.")
        })?;
        if round.decision() == Some(Decision::Rollback) {
            return Err(usage(format!("Round {number} was rolled back."))
                .hint("`hone review iterate` asks for another try, which is measured anew."));
        }
        check_evidence(workspace, history, &queued.commit)?;
        if history.kept.contains(&number) {
            return Ok(None);
        }
        let candidate = candidate_of(round, number)?;
        if candidate.parent != history.head.subject.commit {
            return Err(usage(format!(
                "Round {number} was measured against {}, but the incumbent is now {}.",
                short(&candidate.parent),
                short(&history.head.subject.commit)
            ))
            .hint("Two gains need not add up: `hone review iterate` has it tried on the new incumbent."));
        }
        Ok(Some(Incumbent {
            subject: Subject { commit: queued.commit.clone(), name: candidate.name().into() },
            since: number,
        }))
    })
    .await
}

/// Rolls a candidate back: takes it out of what is kept, or dismisses it.
///
/// # Errors
/// `Usage` when there is nothing to roll back, or later kept changes touch the same lines.
pub async fn rollback(workspace: &Workspace, ledger: &Ledger, campaign: &str, number: u32) -> Result<Outcome> {
    decide(workspace, ledger, campaign, number, Decision::Rollback, None, |history, round| {
        if round.queued.is_none() {
            return Err(usage(format!("Round {number} has nothing to roll back: it is not in the queue."))
                .hint("`hone review list --all` shows what is."));
        }
        if !history.kept.contains(&number) {
            return Ok(None);
        }
        let remaining: Vec<u32> = history.kept.iter().copied().filter(|kept| *kept != number).collect();
        let Some(newest) = remaining.iter().max() else { return Ok(Some(history.baseline())) };
        let candidate = candidate_of(round, number)?;
        let head = &history.head.subject.commit;
        if *head == candidate.commit {
            return Ok(round.observed.as_ref().map(|o| o.incumbent.clone()));
        }
        let message =
            format!("Roll back {}\n\nHone-Campaign: {}\nHone-Round: {number}\n", candidate.name(), history.name);
        let commit = branch::revert(workspace, head, &candidate.parent, &candidate.commit, &message)?;
        let name = format!("kept-{}", short(&commit));
        Ok(Some(Incumbent { subject: Subject { commit, name }, since: *newest }))
    })
    .await
}

/// Sends a note on a round to the next proposals.
///
/// # Errors
/// `Usage` when the note is empty or the campaign is over.
pub async fn iterate(
    workspace: &Workspace,
    ledger: &Ledger,
    campaign: &str,
    number: u32,
    note: &str,
) -> Result<Outcome> {
    let note = note.trim();
    if note.is_empty() {
        return Err(usage("The note is empty.").hint("Say what to try: `--note TEXT`."));
    }
    decide(workspace, ledger, campaign, number, Decision::Iterate, Some(note), |history, round| {
        if history.ended.is_some() {
            return Err(usage(format!("The campaign {campaign} is over: no proposal will read the note."))
                .hint("Start another with `hone campaign run`."));
        }
        match &round.proposed {
            Some(_) => Ok(None),
            None => Err(usage(format!("Round {number} has no proposal yet.")).hint("Wait until it has one.")),
        }
    })
    .await
}

/// Decides under the campaign's decision lock. `head` says what the incumbent becomes, where it changes.
async fn decide(
    workspace: &Workspace,
    ledger: &Ledger,
    campaign: &str,
    number: u32,
    decision: Decision,
    note: Option<&str>,
    head: impl FnOnce(&History, &Round) -> Result<Option<Incumbent>>,
) -> Result<Outcome> {
    let _lock = workspace.lock(&decision_lock(campaign))?;
    let mut history = History::load(ledger, campaign).await?;
    let round = round_of(&history, number)?;
    let last = round.decisions.last();
    let repeated = last.is_some_and(|d| d.decision == decision && d.note.as_deref() == note);
    if !repeated {
        let commit = match &round.candidate {
            Some(candidate) => bound_commit(workspace, candidate)?,
            None => String::new(),
        };
        let decided = Decided { decision, commit, head: head(&history, round)?, note: note.map(str::to_owned) };
        let kind = match decision {
            Decision::Keep => "keep",
            Decision::Rollback => "rollback",
            Decision::Iterate => "iterate",
        };
        let replicate = round.decisions.len() as i64 + 1;
        ledger
            .append(NewEvent::new(campaign, number, step::DECIDE, kind, encode(&decided)?).replicate(replicate))
            .await?;
        history.sync(ledger).await?;
    }
    let kept = kept_branch(campaign);
    let ever = history.heads.len() > 1;
    if ever {
        branch::advance(workspace, &kept, &history.heads, &history.head.subject.commit)?;
    }
    Ok(Outcome { decision, fresh: !repeated, incumbent: history.head, kept_branch: ever.then_some(kept) })
}

/// The commit that a decision is bound to: what was judged, and what its branch still names.
fn bound_commit(workspace: &Workspace, candidate: &branch::Candidate) -> Result<String> {
    match branch::tip(workspace, &candidate.branch)? {
        Some(tip) if tip != candidate.commit => Err(Failure::new(
            Class::Integrity,
            format!(
                "The branch {} names {}, but {} was judged.",
                candidate.branch,
                short(&tip),
                short(&candidate.commit)
            ),
        )
        .hint(
            "What is on the branch now was not measured. Move it away and put the branch back to decide on what was.",
        )),
        _ => Ok(candidate.commit.clone()),
    }
}

/// Every report behind a candidate's scores must still be what was judged: missing evidence is not a pass.
fn check_evidence(workspace: &Workspace, history: &History, commit: &str) -> Result<()> {
    for report in history.reports(commit) {
        let path = workspace.runs_path(&history.name).join(&report.path);
        let found = std::fs::read(&path).map(|bytes| hex::encode(Sha256::digest(bytes)));
        if found.as_ref().ok() != Some(&report.sha256) {
            let what = if found.is_ok() { "was changed" } else { "is missing" };
            return Err(Failure::new(Class::Integrity, format!("The evidence {} {what}.", path.display()))
                .hint("A claim stands only with its evidence: put the report back, or `hone review iterate` for a new measurement."));
        }
    }
    Ok(())
}

/// What a campaign's records were found to be.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verified {
    /// The campaign.
    pub campaign: String,
    /// Events in its chain.
    pub events: i64,
    /// Hash of the last one, which names the chain.
    pub head: String,
    /// The commits that are kept now.
    pub kept: Vec<String>,
    /// Reports behind their scores and behind those of what they were compared with.
    pub reports: usize,
    /// Checkpoints behind them that are what was measured.
    pub checkpoints: usize,
    /// And those that are not there any more: a claim can stand without them, but not be measured again.
    pub missing: usize,
}

/// Checks a campaign again, offline: the hash chain of its events, that each kept commit is there, and that every report behind a kept
/// change, and behind what it was compared with, is what was judged, as is every checkpoint that is still there; and that the campaign's
/// branches are those that the ledger knows. `hash` gives the hash of the checkpoint in a folder.
///
/// # Errors
/// `Integrity`, naming what is not as it was recorded; `Usage` when there is no such campaign.
pub async fn verify(
    workspace: &Workspace,
    ledger: &Ledger,
    campaign: &str,
    hash: &(dyn Fn(&Path) -> Result<String> + Sync),
) -> Result<Verified> {
    let chain = ledger.verify(campaign).await?;
    let history = History::load(ledger, campaign).await?;
    // A driver at work writes the event first and moves the branch then.
    if !workspace.is_locked(campaign)? {
        check_branches(workspace, &history)?;
    }
    let candidates = history.kept.iter().filter_map(|round| history.rounds.get(round)?.candidate.as_ref());
    let (mut kept, mut measured) = (Vec::new(), BTreeSet::new());
    for candidate in candidates {
        workspace.files(&candidate.commit).map_err(|failure| {
            let message = format!("The kept commit {} cannot be read: {}", candidate.commit, failure.message);
            Failure::new(Class::Integrity, message)
                .hint("Look for it with `git fsck`; it may have been collected after its branch was deleted.")
        })?;
        kept.push(candidate.commit.clone());
        // What was kept is often what the next was compared with: each is looked at once.
        measured.extend([&candidate.commit, &candidate.parent]);
    }
    let (mut reports, mut checkpoints, mut missing) = (0, 0, 0);
    for commit in measured {
        check_evidence(workspace, &history, commit)?;
        reports += history.reports(commit).count();
        for run in history.runs(commit) {
            let Some(left) = &run.left else { continue };
            let folder = run_folder(&workspace.runs_path(campaign), &run.subject, run.seed).join(&left.checkpoint);
            if !folder.exists() {
                missing += 1;
            } else if hash(&folder)? == left.hash {
                checkpoints += 1;
            } else {
                let message = format!("The checkpoint {} is not the one that was measured.", folder.display());
                return Err(Failure::new(Class::Integrity, message)
                    .hint("A claim stands only with its evidence: put the checkpoint back, or `hone review iterate` for a new measurement."));
            }
        }
    }
    Ok(Verified {
        campaign: campaign.into(),
        events: chain.events,
        head: chain.head,
        kept,
        reports,
        checkpoints,
        missing,
    })
}

/// Checks that the campaign's branches are the candidates that the ledger knows, and that the kept branch stands at the incumbent.
fn check_branches(workspace: &Workspace, history: &History) -> Result<()> {
    let name = &history.name;
    let known: BTreeSet<&str> =
        history.rounds.values().filter_map(|r| r.candidate.as_ref()).map(|c| c.branch.as_str()).collect();
    for branch in branch::of_campaign(workspace, name)? {
        let branch = format!("hone/{name}/{branch}");
        if branch != kept_branch(name) && !known.contains(branch.as_str()) {
            return Err(Failure::new(Class::Integrity, format!("The ledger knows nothing of the branch {branch}."))
                .hint("Events were cut off the ledger, or the branch is not Hone's: put back a copy of .hone/ledger.db, or rename the branch."));
        }
    }
    let tip = branch::tip(workspace, &kept_branch(name))?;
    let wanted = (history.heads.len() > 1).then_some(&history.head.subject.commit);
    // A driver that died between the two is made up for at the next resume.
    let behind = history.ended.is_none() && tip.as_ref().is_none_or(|tip| history.heads.contains(tip));
    if tip.as_ref() != wanted && !behind {
        let [tip, wanted] = [tip.as_deref(), wanted.map(String::as_str)].map(|c| c.unwrap_or("nothing"));
        let message = format!("The branch {} names {tip}; by the ledger it is {wanted}.", kept_branch(name));
        return Err(Failure::new(Class::Integrity, message)
            .hint("Set it back with `git branch -f`, or put back the ledger that belongs to it."));
    }
    Ok(())
}

fn round_of(history: &History, number: u32) -> Result<&Round> {
    history.rounds.get(&number).ok_or_else(|| {
        usage(format!("The campaign {} has no round {number}.", history.name))
            .hint("`hone campaign status` shows its rounds.")
    })
}

fn candidate_of(round: &Round, number: u32) -> Result<&branch::Candidate> {
    round.candidate.as_ref().ok_or_else(|| usage(format!("Round {number} has no candidate.")))
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Class::Usage, message)
}
