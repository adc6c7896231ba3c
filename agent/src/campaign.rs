//! The campaign: how it starts, goes on after anything, pauses and ends. The driver is plain code that walks the steps in order; a step
//! whose event is in the ledger is read and not done again, so going on is starting over. What a round does is in [`crate::round`].

use crate::admit::CheckRecipe;
use crate::branch;
use crate::goal::{Goal, Parallel};
use crate::history::{History, Round};
use crate::judge::Judge;
use crate::progress::{Observer, Progress};
use crate::proposal::Proposer;
use crate::record::{Ended, Record, Started, Subject, step};
use crate::replay::{Guide, Turn};
use crate::run::Job;
use crate::scope::Scope;
use crate::workspace::{Lock, Workspace};
use hone_evals::suite::{Subset, Suite};
use hone_runs::launcher::Launcher;
use hone_runs::ledger::{Ledger, NewEvent, VOLATILE};
use hone_runs::{Class, Failure, Result, RunFolder};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What the campaign cannot know by itself: the program that trains and evaluates, and what it says of recipes.
pub struct Toolbox {
    /// The program, before its `train` and `eval`.
    pub exe: Vec<String>,
    /// Threads of a run; the same for all, although results do not depend on it.
    pub threads: usize,
    /// GPUs of a run.
    pub gpus: usize,
    /// What the program is told as `--device`; absent: its own default.
    pub device: Option<String>,
    /// The recipe's JSON Schema with its marks.
    pub recipe_schema: serde_json::Value,
    /// Whether a recipe can be run, and what it will take.
    pub check_recipe: Box<CheckRecipe>,
    /// Where runs are run.
    pub launcher: Arc<dyn Launcher>,
    /// How many runs `parallel: auto` means.
    pub slots: usize,
    /// Called after each effect outside the ledger; an error becomes the step's. For tests that abort a campaign there.
    pub fault: Option<EffectHook>,
}

/// Called by [`Toolbox::fault`].
pub type EffectHook = Arc<dyn Fn(Effect) -> Result<()> + Send + Sync>;

/// An effect outside the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A run ended, and its event is not written yet.
    Trained,
    /// An evaluation ended, and its event is not written yet.
    Measured,
    /// A candidate's objects are written, and its event is not.
    Written,
    /// A candidate's branch points at it.
    Published,
    /// The kept branch was moved.
    Kept,
}

/// How a campaign is started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Rounds in place of the goal's.
    pub rounds: Option<u32>,
    /// The campaign's seed.
    pub seed: u64,
}

/// How a drive came to its end, failures apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The campaign is over: all rounds were made, or a budget was reached.
    Over(Ended),
    /// A person asked for a pause.
    Paused,
}

/// A request from another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Pause when the runs under way are done.
    Pause,
    /// End when the runs under way are done; no further round, no closing.
    Stop,
}

/// A campaign in this process's hands.
pub struct Campaign {
    pub(crate) name: String,
    pub(crate) workspace: Workspace,
    pub(crate) ledger: Ledger,
    pub(crate) tools: Toolbox,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) scope: Scope,
    started: Started,
    history: Mutex<History>,
    live: Mutex<BTreeSet<PathBuf>>,
    since: Instant,
    recorded: Mutex<f64>,
    /// The recorded campaign that this one is a replay of.
    guide: Option<Guide>,
    _lock: Lock,
}

/// How long runs that were asked to end are waited for.
const HALT: Duration = Duration::from_secs(20);

/// Rounds without a candidate, one after the other, until the campaign pauses.
const FRUITLESS: u32 = 5;

impl Campaign {
    /// Starts a campaign on the goal at `path` as HEAD has it. The name is the next free of c1, c2, ….
    ///
    /// # Errors
    /// `Usage` when the goal, a suite or the recipe cannot be used, or differs from what is committed.
    pub async fn start(
        path: &Path,
        options: &Options,
        ledger: Ledger,
        tools: Toolbox,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>> {
        let workspace = Workspace::discover(path)?;
        workspace.prepare()?;
        let goal_path = workspace.relative(path)?;
        let trusted = workspace.head()?;
        let text = workspace.text(&trusted, &goal_path)?;
        let mut goal = Goal::parse(&text, &goal_path)?;
        if let Some(rounds) = options.rounds {
            goal.budget.rounds = rounds;
            goal = Goal::parse(&serde_json::to_string(&goal).unwrap_or_default(), "--rounds")?;
        }
        let mut asked = goal.suites();
        asked.extend([goal_path.clone(), goal.run.recipe.clone()]);
        let changed = workspace.uncommitted(&asked)?;
        if !changed.is_empty() {
            return Err(Failure::new(Class::Usage, format!("{} differs from what is committed.", changed.join(", ")))
                .hint("Commit it: a campaign runs from commits, and would not see the change."));
        }
        let slots = match goal.runs.parallel {
            Parallel::Auto => tools.slots.max(1),
            Parallel::At(n) => n,
        };
        let scratch = workspace.scratch()?;
        let tree = scratch.path().join("tree");
        workspace.export(&trusted, &tree)?;
        let data = check_suites(&goal, &tree)?;
        (tools.check_recipe)(&tree, &goal.run.recipe)?;
        let (name, lock) = free_name(&ledger, &workspace).await?;
        let scope = goal.scope(&goal_path, &data)?;
        let protected = workspace.protected_hash(&trusted, |path| scope.allows(path))?;
        let started = Started {
            goal,
            goal_path,
            trusted,
            seed: options.seed,
            slots,
            data,
            protected,
            version: env!("CARGO_PKG_VERSION").into(),
            earlier: 0,
            looks: 0,
        };
        let started = after_others(&ledger, started).await?;
        let payload = encode(&started)?;
        let event = ledger.append(NewEvent::new(&name, 0, step::START, Started::KIND, payload)).await?;
        let history = History::of(&[event.event])?;
        Ok(Arc::new(Self::new(workspace, ledger, tools, observer, scope, history, lock)))
    }

    /// Takes up a campaign where it was left.
    ///
    /// # Errors
    /// `Usage` when there is none of that name, another process drives it, or it was stopped.
    pub async fn open(
        workspace: Workspace,
        name: &str,
        ledger: Ledger,
        tools: Toolbox,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>> {
        History::load(&ledger, name).await?;
        let lock = workspace.try_lock(name)?;
        // Read again under the lock: another driver may have gone on until then.
        let history = History::load(&ledger, name).await?;
        let scope = history.started.goal.scope(&history.started.goal_path, &history.started.data)?;
        let head = workspace.head()?;
        if let Some(now) = workspace.read(&head, &history.started.goal_path)?
            && workspace.read(&history.started.trusted, &history.started.goal_path)? != Some(now)
        {
            observer
                .see(&Progress::Note("The goal has changed since; this campaign goes on with the one it began with."));
        }
        Ok(Arc::new(Self::new(workspace, ledger, tools, observer, scope, history, lock)))
    }

    /// Begins to make a recorded campaign again, in a workspace and a ledger of its own.
    pub(crate) async fn follow(
        workspace: Workspace,
        guide: Guide,
        ledger: Ledger,
        tools: Toolbox,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>> {
        let name = guide.name().to_string();
        let lock = workspace.try_lock(&name)?;
        let payload = guide.started().payload.clone();
        let event = ledger.append(NewEvent::new(&name, 0, step::START, Started::KIND, payload)).await?;
        let history = History::of(&[event.event])?;
        let scope = history.started.goal.scope(&history.started.goal_path, &history.started.data)?;
        let campaign = Self::new(workspace, ledger, tools, observer, scope, history, lock);
        Ok(Arc::new(Self { guide: Some(guide), ..campaign }))
    }

    fn new(
        workspace: Workspace,
        ledger: Ledger,
        tools: Toolbox,
        observer: Arc<dyn Observer>,
        scope: Scope,
        history: History,
        lock: Lock,
    ) -> Self {
        workspace.sweep(&history.name);
        Self {
            name: history.name.clone(),
            started: history.started.clone(),
            history: Mutex::new(history),
            live: Mutex::default(),
            since: Instant::now(),
            recorded: Mutex::default(),
            guide: None,
            _lock: lock,
            workspace,
            ledger,
            tools,
            observer,
            scope,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its goal.
    pub fn goal(&self) -> &Goal {
        &self.started.goal
    }

    /// How it began.
    pub fn started(&self) -> &Started {
        &self.started
    }

    /// Its history so far.
    pub fn history(&self) -> History {
        self.with(History::clone)
    }

    /// Drives it to its end, or to a pause. `proposers` take turns round by round.
    ///
    /// # Errors
    /// What made it pause: mend that, and drive it again. Nothing that is in the ledger is done twice.
    pub async fn run(self: &Arc<Self>, proposers: &[Arc<dyn Proposer>]) -> Result<End> {
        if let Some(ended) = self.with(|history| history.ended.clone()) {
            return Ok(End::Over(ended));
        }
        self.control("resume", None).await?;
        let driven = self.drive(proposers).await;
        match &driven {
            // What the ledger itself refused cannot be written to it.
            Err(failure) if failure.class != Class::Terminated => {
                let _ = self.control("paused", Some(failure)).await;
            }
            Ok(End::Paused) => self.control("paused", None).await?,
            _ => {}
        }
        driven
    }

    async fn drive(self: &Arc<Self>, proposers: &[Arc<dyn Proposer>]) -> Result<End> {
        if proposers.is_empty() {
            return Err(
                Failure::new(Class::Usage, "No proposer was given.").hint("Name one in the goal: `proposer: search`.")
            );
        }
        self.reconcile()?;
        if !self.baseline().await? {
            return Ok(End::Paused);
        }
        let rounds = self.goal().budget.rounds;
        let mut fruitless = 0;
        let mut reason = Ended::ROUNDS.to_string();
        for round in 1..=rounds {
            let (done, used_up) = self.with(|history| {
                let round = history.rounds.get(&round).filter(|r| r.learned.is_some());
                (round.is_some(), round.and_then(Round::used_up))
            });
            if let Some(budget) = used_up {
                reason = budget.to_string();
                break;
            }
            if done {
                continue;
            }
            match self.guide.as_ref().map(|guide| guide.turn(round)) {
                Some(Turn::Unwritten) => return Ok(End::Paused),
                Some(Turn::Ended(why)) if why == Ended::STOPPED => return self.end(Ended::STOPPED).await,
                Some(Turn::Ended(why)) => {
                    reason = why;
                    break;
                }
                Some(Turn::Go) | None => {}
            }
            match self.requested().await? {
                Some(Request::Pause) => return Ok(End::Paused),
                Some(Request::Stop) => return self.end(Ended::STOPPED).await,
                None => {}
            }
            if self.with(|history| !history.rounds.contains_key(&round))
                && let Some(budget) = self.spent()?
            {
                reason = budget;
                break;
            }
            self.observer.see(&Progress::RoundStarted { round, rounds });
            let proposer = &proposers[(round as usize - 1) % proposers.len()];
            match self.round(round, proposer.as_ref()).await? {
                Some(had_candidate) => fruitless = if had_candidate { 0 } else { fruitless + 1 },
                None => return Ok(End::Paused),
            }
            if let Some(budget) = self.with(|history| history.rounds.get(&round).and_then(Round::used_up)) {
                reason = budget.to_string();
                break;
            }
            // A person read it then, and went on.
            if fruitless >= FRUITLESS && round < rounds && self.guide.is_none() {
                let last =
                    self.with(|history| history.rounds.get(&round).and_then(|r| r.refusal()).unwrap_or_default());
                return Err(Failure::new(Class::Agent, format!("{fruitless} rounds in a row had no candidate. The last: {last}"))
                    .hint("Read the refusals with `hone campaign status`, change the proposer or what the goal opens, and resume."));
            }
        }
        if let Some(guide) = &self.guide {
            if !guide.is_over() {
                return Ok(End::Paused);
            }
            self.people(guide.first_of(rounds + 1).unwrap_or(i64::MAX)).await?;
        }
        if !self.closing(rounds + 1).await? {
            return Ok(End::Paused);
        }
        self.end(&reason).await
    }

    async fn end(&self, reason: &str) -> Result<End> {
        let round = self.goal().budget.rounds + 1;
        let ended = self.step(round, step::END, 0, async { Ok(Ended { reason: reason.into() }) }).await?;
        Ok(End::Over(ended))
    }

    /// Makes the branches what the ledger says: a process may have died between the two.
    fn reconcile(&self) -> Result<()> {
        let (candidate, head, heads, kept) = self.with(|history| {
            let last = history.rounds.values().next_back().and_then(|r| r.candidate.clone());
            (last, history.head.clone(), history.heads.clone(), history.heads.len() > 1)
        });
        if let Some(candidate) = candidate {
            branch::publish(&self.workspace, &candidate.branch, &candidate.commit)?;
        }
        if kept {
            branch::advance(&self.workspace, &kept_branch(&self.name), &heads, &head.subject.commit)?;
        }
        Ok(())
    }

    /// Trains and measures the baseline on the first screening seeds. There is nothing to compare with until all have a score. False when a pause
    /// was asked for.
    async fn baseline(self: &Arc<Self>) -> Result<bool> {
        let baseline = self.with(|history| history.baseline());
        let fewest = self.goal().runs.replicates.fewest;
        let jobs = (0..fewest).map(|i| Job {
            round: 0,
            step: step::BASELINE,
            replicate: i as i64,
            subject: baseline.subject.clone(),
            seed: self.started.screening_seed(0, i),
            subset: Subset::DEV,
        });
        if !self.make(jobs.collect()).await? {
            return Ok(false);
        }
        let scores = self.with(|history| history.screening_scores(&baseline));
        if scores.len() < fewest {
            let why = (0..fewest).find_map(|i| {
                let seed = self.started.screening_seed(0, i);
                self.with(|h| match h.score(&baseline.subject.commit, seed, &Subset::DEV, &h.metric_key())? {
                    crate::history::Score::Is(_) => None,
                    crate::history::Score::Invalid(why) | crate::history::Score::Incomplete(why) => Some((seed, why)),
                })
            });
            let (seed, why) = why.unwrap_or_default();
            let folder = self.folder(&baseline.subject, seed);
            return Err(Failure::new(Class::Candidate, format!("The baseline has no score with seed {seed}: {why}"))
                .hint(format!(
                    "See {}. Mend the recipe, commit it, and start a new campaign.",
                    folder.join("stderr.log").display()
                )));
        }
        self.observer.see(&Progress::Baseline { scores: &scores });
        if self.with(|history| history.rounds.is_empty()) {
            let detectable = self.judge(0).detectable();
            let min_effect = self.goal().metric.min_effect;
            if detectable > min_effect {
                let note = format!(
                    "The smallest gain that {} seeds detect here is about {detectable:.3}; `min_effect` is {min_effect}. \
                     Smaller gains will mostly end undecided: allow more replicates or more items, or ask for more.",
                    self.goal().runs.replicates.most
                );
                self.observer.see(&Progress::Note(&note));
            }
        }
        Ok(true)
    }

    /// The judge of a round.
    pub(crate) fn judge(&self, round: u32) -> Judge {
        let goal = self.goal();
        Judge {
            direction: goal.metric.direction,
            min_effect: goal.metric.min_effect,
            replicates: [goal.runs.replicates.fewest, goal.runs.replicates.most],
            gate: goal.gate,
            noise: self.with(|history| history.noise(round)),
        }
    }

    /// The budget that is reached, if any; rounds aside.
    pub(crate) fn spent(&self) -> Result<Option<String>> {
        let budget = &self.goal().budget;
        let cost = self.with(|history| history.cost);
        // Rounds under way are not in the ledger's wall time yet: this process's own is.
        let wall = cost.wall_s + self.unrecorded_wall();
        // Of a replay, what time and disk allowed is the record's to say.
        let first_hand = self.guide.is_none();
        let reached = [
            ("wall", first_hand && budget.wall.is_some_and(|b| wall >= b.as_seconds())),
            ("device_hours", first_hand && budget.device_hours.is_some_and(|b| cost.device_s >= b * 3600.0)),
            ("usd", budget.usd.is_some_and(|b| cost.usd >= b)),
            ("tokens", budget.tokens.is_some_and(|b| cost.model_tokens >= b.0)),
        ];
        if let Some((name, _)) = reached.iter().find(|(_, over)| *over) {
            return Ok(Some((*name).into()));
        }
        let Some(disk) = budget.disk.filter(|_| first_hand) else { return Ok(None) };
        let taken = size(&self.workspace.runs_path(&self.name));
        Ok((taken >= disk.0).then(|| "disk".into()))
    }

    fn unrecorded_wall(&self) -> f64 {
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        self.since.elapsed().as_secs_f64() - *recorded
    }

    /// This process's time at work since it was last asked: what a round's end records.
    pub(crate) fn take_wall(&self) -> f64 {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let new = self.since.elapsed().as_secs_f64() - *recorded;
        *recorded += new;
        new
    }

    /// How many runs may go on at once.
    pub(crate) fn slots(&self) -> usize {
        self.started.slots.max(1)
    }

    /// The event of a step: the stored one, or that of `work`, which is done only where there is none.
    pub(crate) async fn step<T: Record>(
        &self,
        round: u32,
        step: &str,
        replicate: i64,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if let Some(stored) = self.with(|history| history.stored::<T>(round, step, replicate))? {
            return Ok(stored);
        }
        if let Some(position) = self.guide.as_ref().and_then(|g| g.position(round, step, replicate, T::KIND)) {
            self.people(position).await?;
        }
        let made = work.await?;
        self.record(round, step, replicate, made).await
    }

    /// Appends an event and takes it into the history; what stands already stands.
    pub(crate) async fn record<T: Record>(&self, round: u32, step: &str, replicate: i64, made: T) -> Result<T> {
        let payload = encode(&made)?;
        if let Some(guide) = &self.guide {
            guide.check(round, step, replicate, T::KIND, &payload)?;
            if let Some(position) = guide.position(round, step, replicate, T::KIND) {
                self.people(position).await?;
            }
        }
        let event = NewEvent::new(&self.name, round, step, T::KIND, payload).replicate(replicate);
        self.ledger.append(event).await?;
        self.sync().await?;
        let stored = self.with(|history| history.stored::<T>(round, step, replicate))?;
        stored.ok_or_else(|| {
            Failure::new(Class::Integrity, format!("The `{}` event of round {round} is not in the ledger.", T::KIND))
        })
    }

    /// In a replay: the decisions that people had made before a place in the recorded chain.
    pub(crate) async fn people(&self, before: i64) -> Result<()> {
        let Some(guide) = &self.guide else { return Ok(()) };
        for event in guide.decisions(before) {
            let new = NewEvent::new(&self.name, event.round, &event.step, &event.kind, event.payload);
            self.ledger.append(new.replicate(event.replicate)).await?;
        }
        self.sync().await
    }

    /// In a replay: what the record says of a run; None where runs are made.
    pub(crate) fn recall<T: Clone>(&self, what: &str, read: impl FnOnce(&History) -> Option<T>) -> Result<Option<T>> {
        self.guide.as_ref().map_or(Ok(None), |guide| guide.recall(what, read))
    }

    /// In a replay: why the record has no more runs of this round.
    pub(crate) fn cut(&self, round: u32) -> Option<String> {
        let made = self.with(|history| history.made(round));
        self.guide.as_ref().and_then(|guide| guide.cut(round, made))
    }

    /// Takes in what this and other processes appended. Two tasks may read the same events: the fold passes over what it knows.
    pub(crate) async fn sync(&self) -> Result<()> {
        let position = self.with(|history| history.position());
        let events = self.ledger.events_after(&self.name, position).await?;
        self.with_mut(|history| events.iter().try_for_each(|event| history.add(event)))
    }

    /// Records that a run was lost and is tried again. Not in the fold.
    pub(crate) async fn lost(&self, job: &Job, attempt: u32, failure: &Failure) -> Result<()> {
        let payload =
            json!({ VOLATILE: { "name": job.subject.name, "seed": job.seed, "attempt": attempt, "failure": failure } });
        // Several pauses may lie between attempts: each gets a kind of its own.
        for n in 1.. {
            let event = NewEvent::new(&self.name, job.round, job.step, format!("lost-{n}"), payload.clone())
                .replicate(job.replicate);
            if self.ledger.append(event).await?.fresh {
                break;
            }
        }
        Ok(())
    }

    async fn control(&self, kind: &str, failure: Option<&Failure>) -> Result<()> {
        append_control(&self.ledger, &self.name, kind, failure).await?;
        self.sync().await
    }

    /// What another process asked for since this one took over.
    pub(crate) async fn requested(&self) -> Result<Option<Request>> {
        self.sync().await?;
        Ok(self.with(|history| match history.control.as_ref().map(|(kind, _)| kind.as_str()) {
            Some("pause") => Some(Request::Pause),
            Some("stop") => Some(Request::Stop),
            _ => None,
        }))
    }

    pub(crate) fn effect(&self, effect: Effect) -> Result<()> {
        self.tools.fault.as_ref().map_or(Ok(()), |hook| hook(effect))
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(&History) -> R) -> R {
        read(&self.history.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn with_mut<R>(&self, write: impl FnOnce(&mut History) -> R) -> R {
        write(&mut self.history.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes a run as live until the returned guard is dropped.
    pub(crate) fn live<'a>(&'a self, folder: &'a Path) -> impl Drop + use<'a> {
        struct Live<'a>(&'a Campaign, &'a Path);
        impl Drop for Live<'_> {
            fn drop(&mut self) {
                self.0.live.lock().unwrap_or_else(PoisonError::into_inner).remove(self.1);
            }
        }
        self.live.lock().unwrap_or_else(PoisonError::into_inner).insert(folder.to_path_buf());
        Live(self, folder)
    }

    /// Asks the runs under way to save their state and end; they go on from there when the campaign is driven again. For a driver that is
    /// itself asked to end.
    ///
    /// # Errors
    /// When a run could not be reached.
    pub async fn halt(&self) -> Result<()> {
        let live: Vec<PathBuf> = self.live.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
        for folder in &live {
            self.tools.launcher.stop(folder).await?;
        }
        // A run that is live holds its folder's lock; who is told that all is saved should find it so.
        let until = Instant::now() + HALT;
        for folder in &live {
            while RunFolder::open(folder)?.try_lock()?.is_none() && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }

    pub(crate) fn subject_of(&self, candidate: &branch::Candidate) -> Subject {
        Subject { commit: candidate.commit.clone(), name: candidate.name().into() }
    }
}

/// The branch that follows what is kept.
pub fn kept_branch(campaign: &str) -> String {
    format!("hone/{campaign}/kept")
}

/// Asks the driver of a campaign, wherever it runs, to pause or stop. A campaign that nobody drives is stopped at once.
///
/// # Errors
/// `Usage` when there is no such campaign or it is over.
pub async fn request(workspace: &Workspace, ledger: &Ledger, campaign: &str, request: Request) -> Result<()> {
    let history = History::load(ledger, campaign).await?;
    if history.ended.is_some() {
        return Err(Failure::new(Class::Usage, format!("The campaign {campaign} is over."))
            .hint("See it with `hone campaign status`."));
    }
    let kind = match request {
        Request::Pause => "pause",
        Request::Stop => "stop",
    };
    append_control(ledger, campaign, kind, None).await?;
    if request == Request::Stop
        && let Ok(_lock) = workspace.try_lock(campaign)
    {
        let round = history.started.goal.budget.rounds + 1;
        let ended = encode(&Ended { reason: Ended::STOPPED.into() })?;
        ledger.append(NewEvent::new(campaign, round, step::END, Ended::KIND, ended)).await?;
    }
    Ok(())
}

async fn append_control(ledger: &Ledger, campaign: &str, kind: &str, failure: Option<&Failure>) -> Result<()> {
    let mut replicate = History::load(ledger, campaign).await?.next_control();
    let payload = json!({ VOLATILE: { "failure": failure } });
    while !ledger
        .append(NewEvent::new(campaign, 0, step::CONTROL, kind, payload.clone()).replicate(replicate))
        .await?
        .fresh
    {
        replicate += 1;
    }
    Ok(())
}

pub(crate) fn encode<T: serde::Serialize>(value: &T) -> Result<serde_json::Value> {
    serde_json::to_value(value).map_err(|e| Failure::new(Class::Other, format!("An event cannot be written: {e}.")))
}

/// A start that knows what earlier campaigns of the workspace used: a seed or an item that decided something once is not fresh.
async fn after_others(ledger: &Ledger, mut started: Started) -> Result<Started> {
    for name in ledger.campaigns().await? {
        let other = History::load(ledger, &name).await?;
        started.earlier += 1;
        if other.started.goal.metric.suite == started.goal.metric.suite {
            started.looks += other.confirmations(u32::MAX).0;
        }
    }
    Ok(started)
}

/// The next of c1, c2, … that neither the ledger nor a folder of runs nor another start knows, and its lock.
async fn free_name(ledger: &Ledger, workspace: &Workspace) -> Result<(String, Lock)> {
    let known = ledger.campaigns().await?;
    let number = |name: &String| name.strip_prefix('c')?.parse::<u32>().ok();
    let first = known.iter().filter_map(number).max().unwrap_or(0) + 1;
    for name in (first..).map(|number| format!("c{number}")) {
        let lock = match workspace.try_lock(&name) {
            Ok(lock) => lock,
            // Another start holds it.
            Err(failure) if failure.class == Class::Usage => continue,
            Err(failure) => return Err(failure),
        };
        // Asked under the lock: a start that held it before may have written by now.
        if !workspace.runs_path(&name).exists() && ledger.events(&name).await?.is_empty() {
            return Ok((name, lock));
        }
    }
    Err(Failure::new(Class::Other, "There is no name left for a campaign."))
}

/// Checks that the suites have the goal's metrics and enough items in each part; returns the data files that they read.
fn check_suites(goal: &Goal, tree: &Path) -> Result<Vec<String>> {
    let mut data = BTreeSet::new();
    for path in goal.suites() {
        let suite = Suite::load(tree, &path)?;
        data.extend(suite.tasks().iter().filter_map(|task| task.entry().data.file.clone()));
        let floors = goal.floors.iter().filter(|f| f.suite == path).map(|f| &f.name);
        let metric = (goal.metric.suite == path).then_some(&goal.metric.name);
        for name in metric.into_iter().chain(floors) {
            let task = suite.task_of(name)?;
            let parts = (0..goal.metric.folds).map(|i| Subset::held_out_fold(i, goal.metric.folds));
            for subset in [Subset::DEV].into_iter().chain(parts) {
                task.items(&subset).map_err(|f| f.at(format!("{path}, {subset}")))?;
            }
        }
    }
    Ok(data.into_iter().collect())
}

/// Bytes of the files under a folder; what cannot be read counts nothing.
fn size(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => size(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.flatten().map(of).sum()
}
