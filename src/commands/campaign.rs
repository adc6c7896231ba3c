//! `hone campaign`: the loop, wired to this binary's trainer and evals, and shown as it goes.

use super::runtime;
use crate::{
    cli::{Campaign as Command, CampaignName, CampaignRun},
    output,
};
use hone_agent::{
    branch, calls,
    campaign::{self, Campaign, EffectHook, End, Options, Request, Toolbox},
    chaos,
    digest::printable,
    goal::{Goal, Proposer as Kind},
    llm::Llm,
    progress::{Observer, Progress},
    proposal::{Decision, Proposer},
    record::RecipeFacts,
    replay, review,
    search::Search,
    status::{self, Overview, Row, Scores, State},
    workspace::Workspace,
};
use hone_evals::{
    meter::{Budget, Meter, Price, Spend},
    remote::{Client, Endpoint, Recording},
};
use hone_runs::{
    Class, Failure, Result,
    launcher::{LocalLauncher, Slots},
    ledger::Ledger,
};
use hone_trainer::checkpoint;
use hone_trainer::recipe::{self, Recipe};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs one of the family.
pub fn run(command: &Command, json: bool) -> Result<()> {
    match command {
        Command::Run(args) => {
            let options = Options { rounds: args.rounds, seed: args.seed };
            let overview = start(args, &options)?;
            show(&overview, json)?;
            budget_allowed(&overview)
        }
        Command::Resume(args) => {
            let overview = resume(args)?;
            show(&overview, json)?;
            budget_allowed(&overview)
        }
        Command::Status(args) => show(&stands(args)?, json),
        Command::Pause(args) => ask(args, Request::Pause, json),
        Command::Stop(args) => ask(args, Request::Stop, json),
        Command::List { workspace } => list(workspace, json),
    }
}

/// A workspace with its ledger, for the commands that look.
pub struct Opened {
    /// The repository.
    pub workspace: Workspace,
    /// Its ledger.
    pub ledger: Ledger,
    /// What waits for both.
    pub runtime: tokio::runtime::Runtime,
}

impl Opened {
    /// Opens the workspace at or above `path`.
    pub fn at(path: &Path) -> Result<Self> {
        let workspace = Workspace::discover(path)?;
        workspace.prepare()?;
        let runtime = runtime()?;
        let mut ledger = runtime.block_on(Ledger::open(&workspace.ledger_path()))?;
        if chaos::is_doomed() {
            ledger = ledger.with_fault_hook(Arc::new(|_, _| {
                chaos::point();
                Ok(())
            }));
        }
        Ok(Self { workspace, ledger, runtime })
    }

    /// The newest campaign that is not over, for what acts on one; the newest at all where all are over.
    pub fn going(&self, name: Option<&str>) -> Result<String> {
        let known = self.runtime.block_on(self.ledger.campaigns())?;
        for candidate in known.iter().rev().filter(|_| name.is_none()) {
            if self.overview(candidate)?.state != State::Over {
                return Ok(candidate.clone());
            }
        }
        self.campaign(name)
    }

    /// The campaign of that name; the newest where none is named.
    pub fn campaign(&self, name: Option<&str>) -> Result<String> {
        let known = self.runtime.block_on(self.ledger.campaigns())?;
        match name {
            Some(name) if known.iter().any(|k| k == name) => Ok(name.to_owned()),
            Some(name) if !branch::of_campaign(&self.workspace, name)?.is_empty() => Err(Failure::new(
                Class::Integrity,
                format!("The ledger knows no campaign {name}, but the repository has its branches."),
            )
            .hint("The ledger was removed or emptied: put back a copy of .hone/ledger.db.")),
            Some(name) => Err(Failure::new(Class::Usage, format!("There is no campaign `{name}`."))
                .hint(format!("known here: {}", if known.is_empty() { "none".into() } else { known.join(", ") }))),
            None => known.last().cloned().ok_or_else(|| {
                Failure::new(Class::Usage, "There is no campaign in this workspace.")
                    .hint("start one: `hone campaign run`")
            }),
        }
    }

    /// Where a campaign stands.
    pub fn overview(&self, name: &str) -> Result<Overview> {
        self.runtime.block_on(status::overview(&self.workspace, &self.ledger, name))
    }
}

/// This binary as the campaign's trainer and evaluator. `/proc/self/exe`, which a child reads before it becomes another program,
/// outlives a rebuild in mid-campaign.
fn toolbox() -> Toolbox {
    let exe = if cfg!(target_os = "linux") {
        "/proc/self/exe".into()
    } else {
        std::env::current_exe().map_or_else(|_| "hone".into(), |p| p.display().to_string())
    };
    let slots = Slots::all_cores();
    Toolbox {
        threads: 1,
        gpus: 0,
        device: None,
        recipe_schema: recipe::schema(),
        check_recipe: Box::new(|tree, path| {
            let estimate = recipe::estimate(&Recipe::read(&tree.join(path), &[])?, tree)?;
            Ok(RecipeFacts { flops: estimate.flops, tokens: estimate.tokens, params: Some(estimate.params) })
        }),
        slots: slots.cores,
        launcher: Arc::new(LocalLauncher::new(vec![exe.clone().into(), "supervise".into()], slots)),
        exe: vec![exe],
        fault: chaos::is_doomed().then(|| -> EffectHook {
            Arc::new(|_| {
                chaos::point();
                Ok(())
            })
        }),
    }
}

/// The campaign's proposers; those that call a model share one meter.
fn proposers(workspace: &Workspace, campaign: &Campaign) -> Result<Vec<Arc<dyn Proposer>>> {
    let mut meter = None;
    proposers_of(campaign.goal(), |endpoint, budget| {
        let meter = match &meter {
            Some(meter) => Arc::clone(meter),
            None => Arc::clone(meter.insert(calls::meter(workspace, campaign.name(), budget)?)),
        };
        Client::new(endpoint, meter, "propose")
    })
}

/// A goal's proposers, with `client` for those that call a model.
fn proposers_of(
    goal: &Goal,
    mut client: impl FnMut(Endpoint, Budget) -> Result<Client>,
) -> Result<Vec<Arc<dyn Proposer>>> {
    let budget = Budget { tokens: goal.budget.tokens.map(|t| t.0), usd: goal.budget.usd };
    let one = |kind: &Kind| -> Result<Arc<dyn Proposer>> {
        Ok(match kind {
            Kind::Search => Arc::new(Search),
            Kind::Llm(llm) => {
                Arc::new(Llm::new(client(endpoint(llm), budget)?, llm.max_tokens as usize, llm.temperature))
            }
        })
    };
    goal.proposer.all().iter().map(one).collect()
}

/// Makes a campaign again from its record and compares.
pub fn replay(name: &str, train: bool, workspace: &Path, json: bool) -> Result<()> {
    let opened = Opened::at(workspace)?;
    let name = opened.campaign(Some(name))?;
    let display = Arc::new(Display::new());
    let from_record = |goal: &Goal, recording: &Arc<Recording>| {
        let mut meter = None;
        proposers_of(goal, |endpoint, budget| {
            let meter = meter.get_or_insert_with(|| Meter::new(budget, Spend::default(), |_| Ok(())));
            Client::replay(endpoint, Arc::clone(meter), "propose", Arc::clone(recording))
        })
    };
    let replayed = opened.runtime.block_on(replay::replay(
        &opened.workspace,
        &opened.ledger,
        &name,
        train,
        toolbox(),
        display.clone(),
        &from_record,
    ));
    display.clear();
    let found = replayed?;
    output::either(json, &found, || {
        let runs = if found.trained { "runs made again" } else { "runs taken from the record" };
        let part = if found.complete { "the whole campaign" } else { "as far as its last whole round" };
        format!(
            "{name}: {part}, {} rounds, {} recorded replies, {runs}, no network: all {} events are the same, byte for byte ({}).",
            found.rounds,
            found.requests,
            found.events,
            short(&found.hash)
        )
    })
}

/// Where a goal's language model answers.
fn endpoint(llm: &hone_agent::goal::Llm) -> Endpoint {
    Endpoint {
        api_key_env: llm.api_key_env.clone(),
        price: llm.price.map(|p| Price { prompt: p.input, completion: p.output }),
        timeout: llm.timeout,
        ..Endpoint::new(&llm.model, &llm.base_url)
    }
}

/// Refuses endpoints that cannot be called (no key, no URL) before a campaign is begun that could not go on. A goal that cannot be read is
/// left to the start, which says why.
fn check_endpoints(goal: &Path) -> Result<()> {
    let name = goal.display().to_string();
    let parsed = std::fs::read_to_string(goal).ok().and_then(|text| Goal::parse(&text, &name).ok());
    for kind in parsed.iter().flat_map(|goal| goal.proposer.all()) {
        if let Kind::Llm(llm) = kind {
            Client::new(endpoint(llm), Meter::unlimited(), "propose").map_err(|failure| failure.at(&name))?;
        }
    }
    Ok(())
}

/// Starts a campaign and drives it to its end.
pub fn start(args: &CampaignRun, options: &Options) -> Result<Overview> {
    let opened = Opened::at(&args.goal)?;
    check_endpoints(&args.goal)?;
    let display = Arc::new(Display::new());
    let campaign = opened.runtime.block_on(Campaign::start(
        &args.goal,
        options,
        opened.ledger.clone(),
        toolbox(),
        display.clone(),
    ))?;
    drive(&opened, &campaign, &display)
}

fn resume(args: &CampaignName) -> Result<Overview> {
    let opened = Opened::at(&args.workspace)?;
    let name = opened.going(args.campaign.as_deref())?;
    let display = Arc::new(Display::new());
    let campaign = opened.runtime.block_on(Campaign::open(
        Workspace::discover(&args.workspace)?,
        &name,
        opened.ledger.clone(),
        toolbox(),
        display.clone(),
    ))?;
    drive(&opened, &campaign, &display)
}

/// Drives a campaign until it ends, pauses, or a signal asks for a pause; a second signal stops waiting for the runs under way. A hangup
/// asks for nothing: a campaign outlives its terminal.
fn drive(opened: &Opened, campaign: &Arc<Campaign>, display: &Display) -> Result<Overview> {
    let proposers = proposers(&opened.workspace, campaign)?;
    output::say(&format!("campaign {}: {}", campaign.name(), campaign.goal().goal));
    let end = opened.runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let broken = |e| Failure::new(Class::Infrastructure, format!("Cannot listen for signals: {e}."));
        let mut interrupt = signal(SignalKind::interrupt()).map_err(broken)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(broken)?;
        let mut hangup = signal(SignalKind::hangup()).map_err(broken)?;
        let run = campaign.run(&proposers);
        tokio::pin!(run);
        let mut asked: Option<Class> = None;
        loop {
            let class = tokio::select! {
                end = &mut run => return match (end?, asked) {
                    (End::Paused, Some(class)) => Err(interrupted(class, campaign.name())),
                    (end, _) => Ok(end),
                },
                _ = interrupt.recv() => Class::Interrupted,
                _ = terminate.recv() => Class::Terminated,
                _ = hangup.recv() => {
                    output::say("the terminal was closed; the campaign goes on");
                    continue;
                }
            };
            if asked.replace(class).is_some() {
                campaign.halt().await?;
                return Err(interrupted(class, campaign.name()));
            }
            output::say("pausing when the runs under way are done; once more to save them as they are and stop now");
            campaign::request(&opened.workspace, &opened.ledger, campaign.name(), Request::Pause).await?;
        }
    });
    display.clear();
    end.map_err(|failure| resumable(failure, campaign.name()))?;
    opened.overview(campaign.name())
}

/// A failure with the way on from it.
fn resumable(failure: Failure, name: &str) -> Failure {
    let resume = format!("hone campaign resume {name}");
    if failure.hint.as_ref().is_some_and(|hint| hint.contains(&resume)) {
        return failure;
    }
    let hint = failure.hint.clone().map(|hint| format!("{hint}\n      ")).unwrap_or_default();
    failure.hint(format!("{hint}The campaign {name} has paused, nothing is lost; go on with `{resume}`."))
}

fn interrupted(class: Class, name: &str) -> Failure {
    Failure::new(class, format!("The campaign {name} was interrupted; everything is saved."))
        .hint(format!("go on with `hone campaign resume {name}`"))
}

fn stands(args: &CampaignName) -> Result<Overview> {
    let opened = Opened::at(&args.workspace)?;
    opened.overview(&opened.campaign(args.campaign.as_deref())?)
}

fn ask(args: &CampaignName, request: Request, json: bool) -> Result<()> {
    let opened = Opened::at(&args.workspace)?;
    let name = opened.going(args.campaign.as_deref())?;
    opened.runtime.block_on(campaign::request(&opened.workspace, &opened.ledger, &name, request))?;
    let asked = match request {
        Request::Pause => "pause",
        Request::Stop => "stop",
    };
    output::either(json, &json!({"campaign": name, "asked": asked}), || format!("Asked {name} to {asked}."))
}

fn list(workspace: &Path, json: bool) -> Result<()> {
    let opened = Opened::at(workspace)?;
    let names = opened.runtime.block_on(opened.ledger.campaigns())?;
    let all = names.iter().map(|n| opened.overview(n)).collect::<Result<Vec<_>>>()?;
    output::either(json, &all, || {
        let rows = all.iter().map(|o| {
            vec![
                o.campaign.clone(),
                state(o.state).into(),
                format!("{}/{}", o.rounds.len(), o.budget.rounds),
                o.kept.len().to_string(),
                o.goal.clone(),
            ]
        });
        output::table(&["campaign", "state", "rounds", "kept", "goal"], rows)
    })
}

fn state(state: State) -> &'static str {
    match state {
        State::Running => "running",
        State::Paused => "paused",
        State::Interrupted => "interrupted",
        State::Over => "over",
    }
}

/// Checks a campaign's ledger, the commits it kept and the reports behind them again.
pub fn verify(name: &str, workspace: &Path, json: bool) -> Result<()> {
    let opened = Opened::at(workspace)?;
    let name = opened.campaign(Some(name))?;
    let hash = |folder: &Path| checkpoint::load(folder, false).map(|checkpoint| checkpoint.hash);
    let found = opened.runtime.block_on(review::verify(&opened.workspace, &opened.ledger, &name, &hash))?;
    output::either(json, &found, || {
        let commits = if found.kept.len() == 1 { "commit is" } else { "commits are" };
        format!(
            "{name}: {} events, the chain is whole (head {}); {} kept {commits} there; {} reports and {} checkpoints are as they were \
             judged{}.",
            found.events,
            short(&found.head),
            found.kept.len(),
            found.reports,
            found.checkpoints,
            if found.missing == 0 {
                String::new()
            } else {
                format!("; {} checkpoints are not there any more", found.missing)
            }
        )
    })
}

/// A failure where a budget, and not its last round, ended the campaign.
fn budget_allowed(overview: &Overview) -> Result<()> {
    let Some(reason) = overview.over_budget() else { return Ok(()) };
    let (made, all) = (overview.rounds.len(), overview.budget.rounds);
    let message =
        format!("The budget of {reason} ended the campaign {} after {made} of {all} rounds.", overview.campaign);
    Err(Failure::new(Class::Budget, message)
        .hint("What was kept stands. For more, raise it in the goal, commit, and start another campaign."))
}

/// Prints where a campaign stands, as JSON or for people.
pub fn show(overview: &Overview, json: bool) -> Result<()> {
    output::either(json, overview, || page(overview))
}

/// Columns from which on a table of rounds has room for all that it tells.
const WIDE: usize = 110;

/// Rounds, total, queue, and what to type next.
pub fn page(overview: &Overview) -> String {
    let metric = &overview.metric.name;
    let mut page = format!("{} · {} · {}", overview.campaign, overview.goal, state(overview.state));
    if let Some(reason) = &overview.reason {
        let _ = write!(page, " ({reason})");
    }
    let _ = write!(page, "\nbaseline {metric} {}", spread(&overview.baseline));
    if overview.confirmations > 0 {
        let _ = write!(page, "; {} confirmations, each a look at held-out items", overview.confirmations);
    }
    let header = ["", "hypothesis", "change", "score", "was", "effect [95%]", "verdict", "decision", "cost"];
    // A narrow terminal has no room for why and how much; `review show` and `--json` have both.
    let (columns, wrap): (&[usize], &[usize]) =
        if output::width() >= WIDE { (&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[1, 2]) } else { (&[0, 2, 3, 4, 5, 6], &[1]) };
    let header: Vec<&str> = columns.iter().map(|&i| header[i]).collect();
    let rows = overview.rounds.iter().map(|row| {
        let cells = cells(row, overview);
        columns.iter().map(|&i| cells[i].clone()).collect()
    });
    let _ = write!(page, "\n\n{}", output::wrapping(wrap, &header, rows));
    if let Some(total) = overview.closed.as_ref().and_then(|c| c.total.as_ref().map(|t| (c, t))) {
        let (closed, total) = total;
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len().max(1) as f64;
        let _ = write!(
            page,
            "\n\nAll that was kept, against the baseline, on fresh seeds and held-out items: {:.3} against {:.3}, {}.",
            mean(&closed.kept),
            mean(&closed.baseline),
            effect(total.effect, total.interval),
        );
        if closed.head != overview.incumbent.subject.commit {
            let _ = write!(page, " That was measured before what is kept was changed in review.");
        }
    }
    let cost = &overview.cost;
    let _ = write!(page, "\n\n{} runs, {:.2e} FLOPs counted, {:.0} s at work.", cost.runs, cost.flops, cost.wall_s);
    let open: Vec<_> = overview.queue.iter().filter(|item| item.open).collect();
    if open.is_empty() {
        let _ = write!(page, "\nNothing waits for review.");
    } else {
        let rows = open.iter().map(|item| vec![item.id.clone(), item.claim.clone(), item.flags.join(", ")]);
        let _ = write!(page, "\n\nWaiting for review:\n{}", output::table(&["item", "claim", "flags"], rows));
    }
    page
}

fn spread(scores: &Scores) -> String {
    match (scores.mean, scores.interval) {
        (Some(mean), Some([low, high])) => {
            format!("{mean:.3} [{low:.3}, {high:.3}] over {} seeds", scores.scores.len())
        }
        (Some(mean), None) => format!("{mean:.3}"),
        _ => "not yet measured".into(),
    }
}

fn effect(effect: f64, interval: Option<[f64; 2]>) -> String {
    match interval {
        Some([low, high]) => format!("{effect:+.3} [{low:+.2}, {high:+.2}]"),
        None => format!("{effect:+.3}"),
    }
}

fn cells(row: &Row, overview: &Overview) -> Vec<String> {
    let number = |x: Option<f64>| x.map_or_else(|| "–".into(), |x| format!("{x:.3}"));
    let decision = match row.decision {
        Some(Decision::Keep) => "kept",
        Some(Decision::Rollback) => "rolled back",
        Some(Decision::Iterate) => "iterate",
        None if overview.kept.contains(&row.round) => "kept, for now",
        None if overview.queue.iter().any(|item| item.round == row.round && item.open) => "waits",
        None => "–",
    };
    let verdict = match row.verdict {
        Some(verdict) => {
            serde_json::to_value(verdict).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
        }
        None if row.reason.is_some() => "refused".into(),
        None => "–".into(),
    };
    let change = match (&row.verdict, &row.reason) {
        (None, Some(reason)) => cut(reason, 80),
        _ => short_keys(&row.change),
    };
    vec![
        row.round.to_string(),
        because(&row.hypothesis, &row.title),
        change,
        number(row.score),
        number(row.incumbent),
        row.effect.as_ref().map_or_else(|| "–".into(), |e| effect(e.effect, e.interval)),
        verdict,
        decision.into(),
        format!("{} runs, {:.0} s", row.cost.runs, row.cost.device_s),
    ]
}

/// Changes by the last part of each key: `stages.0.sft.batch 512 → 256` as `batch 512 → 256`; an element of a list keeps the list's name.
/// Files keep their paths.
fn short_keys(change: &str) -> String {
    let short = |word: &str| {
        let key = word.starts_with(char::is_alphabetic) && !word.contains('/');
        let parts: Vec<&str> = word.split('.').collect();
        let name = parts.iter().rposition(|part| part.parse::<usize>().is_err()).unwrap_or(0);
        if key { parts[name..].join(".") } else { word.to_owned() }
    };
    change.split(' ').map(short).collect::<Vec<_>>().join(" ")
}

/// The hypothesis as far as it fits a table: its first sentence; the title where there is none.
fn because(hypothesis: &str, title: &str) -> String {
    let sentence = hypothesis.split_inclusive(". ").next().unwrap_or_default().trim();
    cut(if sentence.is_empty() { title } else { sentence }, 46)
}

/// A text of at most about `longest` characters, cut at a word.
fn cut(text: &str, longest: usize) -> String {
    if text.chars().count() <= longest {
        return text.to_owned();
    }
    let cut: String = text.chars().take(longest).collect();
    format!("{} …", cut.rsplit_once(' ').map_or(cut.as_str(), |(whole, _)| whole))
}

/// Live progress on stderr: a line for each thing of note; on a terminal a moving line of what runs below them.
pub struct Display {
    begun: Instant,
    bar: Option<ProgressBar>,
    running: Mutex<BTreeSet<String>>,
}

impl Display {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { begun: Instant::now(), bar, running: Mutex::default() }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        let seconds = self.begun.elapsed().as_secs();
        // What a model wrote neither drives the terminal nor looks like a line of ours.
        let text = printable(text).replace('\n', "\n       ");
        let line = format!("{:>2}:{:02}  {text}", seconds / 60, seconds % 60);
        match &self.bar {
            Some(bar) => bar.println(line),
            None => output::say(&line),
        }
    }

    fn running(&self, run: &str, starts: bool) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if starts {
            running.insert(run.to_owned());
        } else {
            running.remove(run);
        }
        if let Some(bar) = &self.bar {
            let names: Vec<_> = running.iter().map(String::as_str).collect();
            bar.set_message(if names.is_empty() { String::new() } else { format!("running {}", names.join(", ")) });
        }
    }
}

impl Observer for Display {
    fn see(&self, progress: &Progress<'_>) {
        match progress {
            Progress::RunStarted { name, seed, .. } => self.running(&format!("{name}/seed-{seed}"), true),
            Progress::RunFinished { step, name, seed, score, trouble, .. } => {
                self.running(&format!("{name}/seed-{seed}"), false);
                let result = match (score, trouble) {
                    (Some(score), _) => format!("{score:.3}"),
                    (None, trouble) => trouble.unwrap_or("no score").to_owned(),
                };
                self.line(&format!("  {step:<9} {name} seed {seed}: {result}"));
            }
            Progress::Baseline { scores } => {
                let mean = scores.iter().sum::<f64>() / scores.len().max(1) as f64;
                self.line(&format!("baseline: {mean:.3} over {} seeds", scores.len()));
            }
            Progress::RoundStarted { round, rounds } => self.line(&format!("round {round} of {rounds}")),
            Progress::Proposed { title, hypothesis, .. } => self.line(&format!("  try: {title}. {hypothesis}")),
            Progress::Refused { reason, .. } => self.line(&format!("  refused: {reason}")),
            Progress::Verdict { verdict, reason, .. } => {
                self.line(&format!("  {}: {reason}", format!("{verdict:?}").to_lowercase()));
            }
            Progress::Kept { commit, .. } => {
                self.line(&format!("  kept {}, until a person confirms it", short(commit)))
            }
            Progress::Closing { runs } => {
                self.line(&format!("closing: what was kept against the baseline, {runs} fresh runs"))
            }
            Progress::Retrying { name, seed, failure } => {
                self.line(&format!("  again {name} seed {seed}: {}", failure.message));
            }
            Progress::Note(text) => self.line(text),
        }
    }
}

fn short(commit: &str) -> &str {
    commit.get(..10).unwrap_or(commit)
}
