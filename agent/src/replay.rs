//! Replay: a campaign made again in a scratch copy of its workspace, from the replies that its models gave then and with no network, and
//! compared event by event with what the ledger says. What is an input is taken from the record: models' replies, people's decisions,
//! and where a person or a limit of time ended things. All else is computed again. Training runs are taken from the record too, unless
//! they are asked to be made again.

use crate::calls;
use crate::campaign::{Campaign, Toolbox};
use crate::goal::Goal;
use crate::history::{History, Round};
use crate::judge::Screen;
use crate::progress::Observer;
use crate::proposal::Proposer;
use crate::record::{Ended, Started, step};
use crate::workspace::Workspace;
use hone_evals::remote::Recording;
use hone_runs::ledger::{Event, Ledger, canonical, fold};
use hone_runs::{Class, Failure, Result, failure::Context};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A replay that came out the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// The campaign.
    pub campaign: String,
    /// Whole rounds that were made again.
    pub rounds: u32,
    /// Events of the fold that are the same, byte for byte.
    pub events: usize,
    /// Different requests to models, each answered from the record.
    pub requests: usize,
    /// Whether training and evaluation were made again, too, and not taken from the record.
    pub trained: bool,
    /// Whether the campaign is over and all of it was made again; else the part up to its last whole round was.
    pub complete: bool,
    /// Hash of the fold.
    pub hash: String,
}

/// The proposers of a goal, answered from a recording.
pub type Proposers<'a> = dyn Fn(&Goal, &Arc<Recording>) -> Result<Vec<Arc<dyn Proposer>>> + 'a;

/// Makes `name` again and compares. `train`: its runs, too.
///
/// # Errors
/// `Integrity` with the first difference; `Usage` where there is nothing to replay; and whatever the loop itself fails with.
pub async fn replay(
    workspace: &Workspace,
    ledger: &Ledger,
    name: &str,
    train: bool,
    tools: Toolbox,
    observer: Arc<dyn Observer>,
    proposers: &Proposers<'_>,
) -> Result<Replayed> {
    ledger.verify(name).await?;
    let events = ledger.events(name).await?;
    let history = History::load(ledger, name).await?;
    let started = &history.started;
    check_start(workspace, started)?;
    let recording = Arc::new(calls::recording(workspace, name)?);
    let all = proposers(&started.goal, &recording)?;

    let scratch = workspace.scratch()?;
    let root = scratch.path().join("workspace");
    let twin = workspace.twin(&root, &started.trusted)?;
    twin.prepare()?;
    if !train {
        let cannot = || "The run records cannot be copied".to_string();
        link(&workspace.runs_path(name), &twin.runs_path(name)).context(Class::Infrastructure, cannot)?;
    }
    let own = Ledger::open(&twin.ledger_path()).await?;
    let guide = Guide::new(events, history, !train)?;
    let (last, complete) = (guide.last, guide.is_complete());
    let expected = fold(&guide.followed());
    let campaign = Campaign::follow(twin, guide, own.clone(), tools, observer).await?;
    campaign.run(&all).await?;
    campaign.people(i64::MAX).await?;

    let found = own.canonical_fold(name).await?;
    let bytes = |fold: &hone_runs::ledger::Fold| serde_json::to_vec(&fold.events).unwrap_or_default();
    if found.hash != expected.hash || bytes(&found) != bytes(&expected) {
        let at = found.events.iter().zip(&expected.events).position(|(a, b)| a != b);
        let at = at.unwrap_or(found.events.len().min(expected.events.len()));
        let what = expected.events.get(at).or(found.events.get(at));
        let what = what.map_or(String::new(), |e| format!("round {}, step `{}`, `{}`", e.round, e.step, e.kind));
        let message = format!(
            "The replay has {} events, the campaign {}; the first difference is {what}.",
            found.events.len(),
            expected.events.len()
        );
        return Err(Failure::new(Class::Integrity, message).hint(DIFFERS));
    }
    Ok(Replayed {
        campaign: name.into(),
        rounds: last,
        events: found.events.len(),
        requests: recording.len() - recording.left(),
        trained: train,
        complete,
        hash: found.hash,
    })
}

const DIFFERS: &str =
    "Hone, the environment's secrets or a file of the campaign differ from then, or the ledger was written to.";

/// What a campaign begins with is computed from the trusted commit again.
fn check_start(workspace: &Workspace, started: &Started) -> Result<()> {
    let differs = |what: &str| Err(Failure::new(Class::Integrity, format!("At the start, {what}.")).hint(DIFFERS));
    let mut goal = Goal::parse(&workspace.text(&started.trusted, &started.goal_path)?, &started.goal_path)?;
    goal.budget.rounds = started.goal.budget.rounds;
    if goal != started.goal {
        return differs("the goal of the trusted commit is not the one that the ledger has");
    }
    let scope = goal.scope(&started.goal_path, &started.data)?;
    if workspace.protected_hash(&started.trusted, |path| scope.allows(path))? != started.protected {
        return differs("the protected files' hash is not the one that the ledger has");
    }
    Ok(())
}

/// The files of a campaign's run folders but for trees and checkpoints, which nothing that is replayed reads. Linked where the file
/// system can: they are only read.
fn link(from: &Path, to: &Path) -> std::io::Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, kind) = entry.and_then(|e| e.file_type().map(|kind| (e, kind)))?;
        let name = entry.file_name();
        if kind.is_dir() && !["tree", "checkpoints"].iter().any(|left_out| name == *left_out) {
            link(&entry.path(), &to.join(&name))?;
        } else if kind.is_file() && fs::hard_link(entry.path(), to.join(&name)).is_err() {
            fs::copy(entry.path(), to.join(&name))?;
        }
    }
    Ok(())
}

/// The recorded campaign that a replay follows.
pub(crate) struct Guide {
    events: Vec<Event>,
    keys: BTreeMap<(u32, String, i64, String), usize>,
    history: History,
    reuse: bool,
    /// The last round that is whole.
    last: u32,
    /// People's decisions so far.
    people: Mutex<usize>,
}

/// What the record says of a round that is about to begin.
pub(crate) enum Turn {
    /// It was made.
    Go,
    /// The campaign has not come so far.
    Unwritten,
    /// It was not: a person or a limit of time ended the campaign.
    Ended(String),
}

impl Guide {
    fn new(events: Vec<Event>, history: History, reuse: bool) -> Result<Self> {
        let whole = |round: &u32| history.rounds.get(round).is_some_and(|r| r.learned.is_some());
        let last = (1..).take_while(whole).last().unwrap_or(0);
        if last == 0 && history.ended.is_none() {
            return Err(Failure::new(Class::Usage, format!("{} has no whole round yet.", history.name))
                .hint("Replay it when its first round is done."));
        }
        let key = |event: &Event| (event.round, event.step.clone(), event.replicate, event.kind.clone());
        let keys = events.iter().enumerate().map(|(i, event)| (key(event), i)).collect();
        Ok(Self { events, keys, history, reuse, last, people: Mutex::default() })
    }

    /// Whether the whole campaign can be followed: it is over, and no round was left half-made.
    fn is_complete(&self) -> bool {
        self.history.ended.is_some() && self.history.rounds.keys().all(|round| *round <= self.last)
    }

    /// Whether an event lies in what is followed: whole rounds, and what came after them where the campaign is over.
    fn follows(&self, event: &Event) -> bool {
        let after = self.history.started.goal.budget.rounds + 1;
        event.round <= self.last || (self.history.ended.is_some() && event.round == after)
    }

    fn followed(&self) -> Vec<Event> {
        self.events.iter().filter(|event| self.follows(event)).cloned().collect()
    }

    pub(crate) fn started(&self) -> &Event {
        &self.events[0]
    }

    pub(crate) fn name(&self) -> &str {
        &self.history.name
    }

    /// The recorded event of a key.
    fn find(&self, round: u32, step: &str, replicate: i64, kind: &str) -> Option<&Event> {
        self.keys.get(&(round, step.into(), replicate, kind.into())).map(|i| &self.events[*i])
    }

    /// Where the event of a key stands in the recorded chain.
    pub(crate) fn position(&self, round: u32, step: &str, replicate: i64, kind: &str) -> Option<i64> {
        self.find(round, step, replicate, kind).map(|event| event.position)
    }

    /// Where the first event of a round stands, the closing's as another.
    pub(crate) fn first_of(&self, round: u32) -> Option<i64> {
        self.events.iter().find(|e| e.round == round && e.step != step::CONTROL).map(|e| e.position)
    }

    /// People's decisions that were made before `position` and not handed out yet.
    pub(crate) fn decisions(&self, position: i64) -> Vec<Event> {
        let mut next = self.people.lock().unwrap_or_else(PoisonError::into_inner);
        let is_person =
            |event: &&Event| ["keep", "rollback", "iterate"].contains(&event.kind.as_str()) && self.follows(event);
        let from = *next;
        *next += self.events[from..].iter().take_while(|event| event.position < position).count();
        self.events[from..*next].iter().filter(is_person).cloned().collect()
    }

    /// Refuses what is not as it was recorded, and says what and where.
    pub(crate) fn check(&self, round: u32, step: &str, replicate: i64, kind: &str, payload: &Value) -> Result<()> {
        let place = format!("In round {round}, step `{step}`");
        let Some(recorded) = self.find(round, step, replicate, kind) else {
            let message = format!("{place}, the replay has a `{kind}` ({replicate}) that the campaign has not.");
            return Err(Failure::new(Class::Integrity, message).hint(DIFFERS));
        };
        let (then, now) = (canonical(&recorded.payload), canonical(payload));
        let Some((path, then, now)) = parting(String::new(), then.as_ref(), now.as_ref()) else { return Ok(()) };
        let message = format!("{place}, the `{kind}` differs: `{path}` was {then}, and is now {now}.");
        Err(Failure::new(Class::Integrity, message).hint(DIFFERS))
    }

    /// What is known of a run without making it: None where runs are made again.
    ///
    /// # Errors
    /// `Integrity` where the campaign did not make it.
    pub(crate) fn recall<T: Clone>(&self, what: &str, read: impl FnOnce(&History) -> Option<T>) -> Result<Option<T>> {
        if !self.reuse {
            return Ok(None);
        }
        let missing = || {
            Failure::new(Class::Integrity, format!("The replay asks for {what}, which the campaign did not make."))
                .hint(DIFFERS)
        };
        read(&self.history).ok_or_else(missing).map(Some)
    }

    pub(crate) fn turn(&self, round: u32) -> Turn {
        let begun = self.history.rounds.get(&round).is_some_and(|r| r.observed.is_some());
        match &self.history.ended {
            _ if begun && round <= self.last => Turn::Go,
            None => Turn::Unwritten,
            Some(ended) if begun || OUTSIDE.contains(&ended.reason.as_str()) => Turn::Ended(ended.reason.clone()),
            Some(_) => Turn::Go,
        }
    }

    /// Whether the campaign came to its end.
    pub(crate) fn is_over(&self) -> bool {
        self.history.ended.is_some()
    }

    /// Why no more runs of a round were made, where a person or a limit of time said so after `made` results.
    pub(crate) fn cut(&self, round: u32, made: usize) -> Option<String> {
        let recorded = self.history.rounds.get(&round)?;
        let stopped = |round: &Round| match round.screened.as_ref().map(|s| &s.screen) {
            Some(Screen::Stop { reason, .. }) => Some(reason.clone()),
            _ => round.ruling.as_ref().map(|r| r.reason.clone()),
        };
        let reason = stopped(recorded)?;
        let is_outside = reason == STOPPED || OUTSIDE.iter().any(|budget| reason == reached(budget));
        (is_outside && made >= self.history.made(round)).then_some(reason)
    }
}

/// Ends that no computation of the loop can tell again.
const OUTSIDE: [&str; 4] = [Ended::STOPPED, "wall", "disk", "device_hours"];

/// Why a round whose campaign was stopped has no verdict.
pub(crate) const STOPPED: &str = "The campaign was stopped.";

/// Why a round that met a budget has no verdict.
pub(crate) fn reached(budget: &str) -> String {
    format!("The budget of {budget} was reached before the round was done.")
}

/// The first place where two values differ: its path, and what stands there on either side.
fn parting(path: String, then: Option<&Value>, now: Option<&Value>) -> Option<(String, String, String)> {
    let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match (then, now) {
        _ if then == now => None,
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            keys.into_iter().find_map(|key| parting(below(key), a.get(key), b.get(key)))
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            (0..a.len().max(b.len())).find_map(|i| parting(below(&i.to_string()), a.get(i), b.get(i)))
        }
        _ => {
            let shown = |value: Option<&Value>| {
                value.map_or("absent".into(), |value| crate::digest::cut(&value.to_string(), 120))
            };
            Some((path, shown(then), shown(now)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_difference_has_its_path_and_both_sides() {
        let (then, now) = (json!({"a": {"b": [1, 2]}, "c": 1}), json!({"a": {"b": [1, 3]}, "c": 2}));
        let (path, was, is) = parting(String::new(), Some(&then), Some(&now)).unwrap();
        assert_eq!((path.as_str(), was.as_str(), is.as_str()), ("a.b.1", "2", "3"));
        let (path, was, is) = parting(String::new(), Some(&json!({"a": 1})), Some(&json!({}))).unwrap();
        assert_eq!((path.as_str(), was.as_str(), is.as_str()), ("a", "1", "absent"));
        assert_eq!(parting(String::new(), Some(&then), Some(&then)), None);
    }
}
