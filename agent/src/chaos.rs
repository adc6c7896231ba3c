//! Faults put into whole campaigns of the built program, to see that they change nothing: a small campaign runs once undisturbed, then
//! again with each kind of fault, and both must come to the same canonical fold, branches and kept changes, with the person's own
//! files, index, stash and HEAD byte for byte as they were.

mod disk;
mod messes;

pub use disk::enter_small_disk;

use crate::history::History;
use crate::workspace::Workspace;
use hone_runs::failure::Context;
use hone_runs::ledger::{Folded, Ledger};
use hone_runs::process::{self, Process};
use hone_runs::{Class, Failure, Result, clock};
use nix::sys::signal::Signal;
use rand::Rng;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A number n: the process kills itself at the n-th point at which something was just written, or is about to be.
pub const DIE_AT: &str = "HONE_DIE_AT";

static AT: LazyLock<Option<u64>> = LazyLock::new(|| std::env::var(DIE_AT).ok()?.parse().ok());

/// Whether this process is to die at a point.
pub fn is_doomed() -> bool {
    AT.is_some()
}

/// One of the points that [`DIE_AT`] counts: before and after each event, and after each effect between events.
pub fn point() {
    static PASSED: AtomicU64 = AtomicU64::new(0);
    if *AT == Some(PASSED.fetch_add(1, Ordering::SeqCst) + 1) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), Signal::SIGKILL);
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// kill -9: of the driver at random instants and at exact points between ledger and git, and of all that it started too.
    Kill,
    /// Processes stopped and continued, the driver and its runs.
    Pause,
    /// A wall clock that is off by up to a year, by another amount in each life.
    Clock,
    /// A disk that is full at random instants.
    Disk,
    /// Fifty candidates written at once, over repositories in every state that a person may leave one in.
    Git,
}

impl Fault {
    /// All, in the order in which they are tried.
    pub const ALL: [Self; 5] = [Self::Git, Self::Kill, Self::Pause, Self::Clock, Self::Disk];
}

/// What came of one kind of fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The kind.
    pub fault: Fault,
    /// How many faults were put in.
    pub faults: u32,
    /// How many campaigns (for [`Fault::Git`]: repositories) they were put into.
    pub campaigns: u32,
    /// What differs from the undisturbed campaign; empty where nothing does.
    pub differences: Vec<String>,
    /// Why it could not be tried here; then nothing was.
    pub skipped: Option<String>,
    /// Seconds that it took.
    pub seconds: f64,
}

/// Told how far a trial is, in words.
pub type See<'a> = &'a dyn Fn(&str);

/// The trials of one program in one folder.
pub struct Chaos {
    program: PathBuf,
    folder: PathBuf,
    kills: u32,
    seed: u64,
    trace: Trace,
    length: Duration,
}

/// What must not change.
#[derive(Debug, Default, PartialEq)]
struct Trace {
    fold: Vec<Folded>,
    hash: String,
    branches: BTreeMap<String, String>,
    kept: Vec<u32>,
    belongings: Belongings,
}

/// The person's own: each file of the workspace and of its repository, by path, with its content; a link with its target.
type Belongings = BTreeMap<PathBuf, Vec<u8>>;

/// The campaign of every trial.
const CAMPAIGN: &str = "c1";

/// Lives without an end after which a campaign counts as stuck.
const LIVES: u32 = 100;

impl Chaos {
    /// Makes a workspace of `files` in `folder`, with work in progress in it, and runs its campaign once undisturbed by `program`.
    ///
    /// # Errors
    /// Where the folder cannot be written, or the undisturbed campaign does not come to its end.
    pub fn prepare(program: &Path, folder: &Path, files: &[(&str, &str)], kills: u32, seed: u64) -> Result<Self> {
        let template = folder.join("template");
        Workspace::create(&template, files)?;
        messes::work_in_progress(&template)?;
        let mut chaos = Self {
            program: program.into(),
            folder: folder.into(),
            kills,
            seed,
            trace: Trace::default(),
            length: Duration::ZERO,
        };
        let undisturbed = chaos.copy("undisturbed")?;
        let begun = Instant::now();
        chaos.last(&undisturbed)?;
        chaos.length = begun.elapsed();
        chaos.trace = Trace::of(&undisturbed)?;
        let before = belongings(&template)?;
        if chaos.trace.belongings != before {
            let differences = changed(&before, &chaos.trace.belongings).join("; ");
            return Err(Failure::new(
                Class::Integrity,
                format!("An undisturbed campaign changed what is not its own: {differences}."),
            ));
        }
        Ok(chaos)
    }

    /// Tries one kind of fault.
    ///
    /// # Errors
    /// Where the trial itself cannot be made. What a fault changes is no error but in the outcome.
    pub fn try_out(&self, fault: Fault, see: See) -> Result<Outcome> {
        let begun = Instant::now();
        let mut outcome =
            Outcome { fault, faults: 0, campaigns: 0, differences: Vec::new(), skipped: None, seconds: 0.0 };
        match fault {
            Fault::Kill => self.kill(&mut outcome, see)?,
            Fault::Pause => self.pause(&mut outcome, see)?,
            Fault::Clock => self.clock(&mut outcome, see)?,
            Fault::Disk => self.fill(&mut outcome, see)?,
            Fault::Git => messes::fifty_at_once(&self.folder, &mut outcome, see)?,
        }
        outcome.seconds = begun.elapsed().as_secs_f64();
        Ok(outcome)
    }

    fn kill(&self, outcome: &mut Outcome, see: See) -> Result<()> {
        let mut draw = hone_runs::draws(self.seed, "chaos: kills", 0, 0);
        while outcome.faults < self.kills {
            outcome.campaigns += 1;
            let folder = self.copy(&format!("kill-{}", outcome.campaigns))?;
            let mut over = false;
            while !over && outcome.faults < self.kills {
                see(&format!("kill {} of {}", outcome.faults + 1, self.kills));
                let mut command = self.command(&folder)?;
                let at_a_point = draw.next_u32().is_multiple_of(2);
                if at_a_point {
                    command.env(DIE_AT, (1 + draw.next_u32() % 24).to_string());
                }
                let mut life = start(&mut command)?;
                let ended = if at_a_point { ends(&mut life)? } else { self.ends_within(&mut life, share(&mut draw))? };
                over = ended.is_some_and(|status| status.success());
                if !over {
                    let _ = life.kill();
                    let _ = life.wait();
                    outcome.faults += 1;
                    // One time in four all that it started goes with it, as when the power fails.
                    if draw.next_u32().is_multiple_of(4) {
                        kill_runs(&folder)?;
                    }
                }
            }
            self.finish(&folder, outcome)?;
        }
        Ok(())
    }

    fn pause(&self, outcome: &mut Outcome, see: See) -> Result<()> {
        const PAUSES: u32 = 30;
        let mut draw = hone_runs::draws(self.seed, "chaos: pauses", 0, 0);
        while outcome.faults < PAUSES {
            outcome.campaigns += 1;
            self.pause_one(&mut draw, outcome, see)?;
        }
        Ok(())
    }

    /// A campaign with pauses all along.
    fn pause_one(&self, draw: &mut impl Rng, outcome: &mut Outcome, see: See) -> Result<()> {
        let folder = self.copy(&format!("pause-{}", outcome.campaigns))?;
        let mut life = start(&mut self.command(&folder)?)?;
        while life.try_wait().context(Class::Infrastructure, lost)?.is_none() {
            let mut all = process::of_runs(&folder);
            all.extend(Process::find(life.id() as i32));
            let one = all[draw.next_u32() as usize % all.len().max(1)];
            see(&format!("pause {}", outcome.faults + 1));
            one.signal(Signal::SIGSTOP).context(Class::Infrastructure, lost)?;
            std::thread::sleep(Duration::from_secs_f64(0.02 + 0.2 * share(draw)));
            one.signal(Signal::SIGCONT).context(Class::Infrastructure, lost)?;
            outcome.faults += 1;
            std::thread::sleep(Duration::from_secs_f64(0.1 * share(draw)));
        }
        self.finish(&folder, outcome)
    }

    fn clock(&self, outcome: &mut Outcome, see: See) -> Result<()> {
        const YEAR: f64 = 366.0 * 24.0 * 3600.0;
        let mut draw = hone_runs::draws(self.seed, "chaos: clocks", 0, 0);
        outcome.campaigns = 1;
        let folder = self.copy("clock")?;
        for _ in 0..8 {
            see(&format!("clock jump {}", outcome.faults + 1));
            let skew = (YEAR * (2.0 * share(&mut draw) - 1.0)) as i64;
            let mut life = start(self.command(&folder)?.env(clock::SKEW, skew.to_string()))?;
            outcome.faults += 1;
            if self.ends_within(&mut life, 2.0 * share(&mut draw))?.is_some_and(|status| status.success()) {
                break;
            }
            let _ = life.kill();
            let _ = life.wait();
        }
        self.finish(&folder, outcome)
    }

    /// Drives to the end without faults, and notes what differs from the undisturbed campaign.
    fn finish(&self, folder: &Path, outcome: &mut Outcome) -> Result<()> {
        let differences = match self.last(folder).and_then(|()| Trace::of(folder)) {
            Ok(trace) => self.trace.differences(&trace),
            Err(failure) => vec![failure.to_string()],
        };
        if differences.is_empty() {
            // Kept where something differs, so that it can be looked at.
            fs::remove_dir_all(folder).context(Class::Infrastructure, || format!("{} stays", folder.display()))?;
        }
        let named = differences.into_iter().map(|difference| format!("{}: {difference}", folder.display()));
        outcome.differences.extend(named);
        Ok(())
    }

    /// Lives without faults until the campaign is over. A pause for trouble of the machine's is allowed: it says what to do.
    fn last(&self, folder: &Path) -> Result<()> {
        for _ in 0..LIVES {
            let output = self.command(folder)?.stderr(Stdio::piped()).output().context(Class::Infrastructure, lost)?;
            let said = String::from_utf8_lossy(&output.stderr);
            match output.status.code() {
                Some(0) => return Ok(()),
                Some(6) if said.contains("hint") => {}
                code => {
                    let last: Vec<&str> = said.lines().rev().take(5).collect();
                    let said = last.into_iter().rev().collect::<Vec<_>>().join(" | ");
                    return Err(Failure::new(Class::Other, format!("The campaign ended with {code:?}: {said}")));
                }
            }
        }
        Err(Failure::new(Class::Other, format!("The campaign was not over after {LIVES} lives.")))
    }

    /// The campaign's beginning, or its next life.
    fn command(&self, folder: &Path) -> Result<Command> {
        let database = folder.join(".hone/ledger.db");
        let begun = database.exists() && !wait(async { Ledger::open(&database).await?.campaigns().await })?.is_empty();
        let mut command = Command::new(&self.program);
        command.current_dir(folder).args(["--json", "campaign", if begun { "resume" } else { "run" }]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    /// Waits for an end, at most for a share of a sixth of the undisturbed campaign.
    fn ends_within(&self, life: &mut Child, share: f64) -> Result<Option<ExitStatus>> {
        let until = Instant::now() + self.length.mul_f64(share / 6.0);
        while Instant::now() < until {
            if let Some(status) = life.try_wait().context(Class::Infrastructure, lost)? {
                return Ok(Some(status));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(None)
    }

    /// A fresh copy of the workspace.
    fn copy(&self, name: &str) -> Result<PathBuf> {
        copy(&self.folder, name)
    }
}

fn copy(folder: &Path, name: &str) -> Result<PathBuf> {
    let to = folder.join(name);
    copy_folder(&folder.join("template"), &to)
        .context(Class::Infrastructure, || format!("{} cannot be written", to.display()))?;
    Ok(to)
}

fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (path, kind) = entry.map(|e| (e.path(), e.file_type()))?;
        let into = to.join(path.file_name().unwrap_or_default());
        match kind? {
            kind if kind.is_dir() => copy_folder(&path, &into)?,
            kind if kind.is_symlink() => std::os::unix::fs::symlink(fs::read_link(&path)?, &into)?,
            _ => fs::copy(&path, &into).map(drop)?,
        }
    }
    Ok(())
}

/// Everything below `folder` that Hone has no business with.
fn belongings(folder: &Path) -> Result<Belongings> {
    const OURS: [&str; 5] = [".hone", "runs", ".git/objects", ".git/refs/heads/hone", ".git/logs/refs/heads/hone"];
    fn add(root: &Path, folder: &Path, found: &mut Belongings) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let (path, kind) = entry.map(|e| (e.path(), e.file_type()))?;
            let name = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
            match kind? {
                _ if OURS.iter().any(|ours| name == Path::new(ours)) => {}
                kind if kind.is_dir() => add(root, &path, found)?,
                kind if kind.is_symlink() => {
                    found.insert(name, fs::read_link(&path)?.into_os_string().into_encoded_bytes());
                }
                _ => {
                    found.insert(name, fs::read(&path)?);
                }
            }
        }
        Ok(())
    }
    let mut found = Belongings::new();
    add(folder, folder, &mut found)
        .context(Class::Infrastructure, || format!("{} cannot be read", folder.display()))?;
    Ok(found)
}

/// The files that differ, with what happened to them.
fn changed(before: &Belongings, after: &Belongings) -> Vec<String> {
    let names: BTreeSet<&PathBuf> = before.keys().chain(after.keys()).collect();
    let word = |name: &PathBuf| match (before.get(name), after.get(name)) {
        (Some(_), None) => Some("is gone"),
        (None, Some(_)) => Some("is new"),
        (old, new) => (old != new).then_some("has changed"),
    };
    names.into_iter().filter_map(|name| word(name).map(|word| format!("{} {word}", name.display()))).collect()
}

impl Trace {
    fn of(folder: &Path) -> Result<Self> {
        let (fold, kept) = wait(async {
            let ledger = Ledger::open(&folder.join(".hone/ledger.db")).await?;
            ledger.verify(CAMPAIGN).await?;
            let kept = History::load(&ledger, CAMPAIGN).await?.kept;
            let fold = ledger.canonical_fold(CAMPAIGN).await?;
            ledger.close().await;
            Ok((fold, kept))
        })?;
        let failed = || format!("The branches of {} cannot be read", folder.display());
        let repository = git2::Repository::open(folder).context(Class::Infrastructure, failed)?;
        let references = repository.references_glob("refs/heads/hone/*").context(Class::Infrastructure, failed)?;
        let branches =
            references.flatten().filter_map(|r| Some((r.name().ok()?.to_owned(), r.target()?.to_string()))).collect();
        Ok(Self { fold: fold.events, hash: fold.hash, branches, kept, belongings: belongings(folder)? })
    }

    fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        if self.hash != other.hash {
            let at = self.fold.iter().zip(&other.fold).position(|(a, b)| a != b);
            let event = at.map(|at| &other.fold[at]);
            let what = event.map_or_else(
                || format!("{} events instead of {}", other.fold.len(), self.fold.len()),
                |event| format!("round {}, step {}, {}", event.round, event.step, event.kind),
            );
            found.push(format!("the fold differs, first in {what}"));
        }
        if self.branches != other.branches {
            found.push(format!("branches {:?} instead of {:?}", other.branches, self.branches));
        }
        if self.kept != other.kept {
            found.push(format!("kept {:?} instead of {:?}", other.kept, self.kept));
        }
        found.extend(changed(&self.belongings, &other.belongings));
        found
    }
}

fn start(command: &mut Command) -> Result<Child> {
    command.spawn().context(Class::Infrastructure, || "The program cannot be started".into())
}

fn ends(life: &mut Child) -> Result<Option<ExitStatus>> {
    life.wait().map(Some).context(Class::Infrastructure, lost)
}

fn kill_runs(folder: &Path) -> Result<()> {
    // All stand still first: a supervisor must not see its run die and record that, as it would not when the power fails.
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        for process in process::of_runs(folder) {
            process.signal(signal).context(Class::Infrastructure, lost)?;
        }
    }
    Ok(())
}

fn lost() -> String {
    "A process of the trial was lost".into()
}

/// A number from 0 to 1.
fn share(draw: &mut impl Rng) -> f64 {
    f64::from(draw.next_u32()) / f64::from(u32::MAX)
}

fn wait<T>(what: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context(Class::Infrastructure, || "Cannot start the asynchronous runtime".into())?.block_on(what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_kind_of_difference_is_named() {
        let event = |value: u32| Folded {
            round: 1,
            step: "screen".into(),
            replicate: 0,
            kind: "screened".into(),
            payload: json!({"value": value}),
        };
        let trace = |value: u32, text: &str| Trace {
            fold: vec![event(value)],
            hash: value.to_string(),
            branches: BTreeMap::from([("hone/c1/r001".into(), value.to_string())]),
            kept: vec![value],
            belongings: Belongings::from([("mine.txt".into(), text.into()), (format!("{value}.txt").into(), vec![])]),
        };
        assert_eq!(trace(1, "a").differences(&trace(1, "a")), Vec::<String>::new());
        let found = trace(1, "a").differences(&trace(2, "b"));
        let expected = [
            "the fold differs, first in round 1, step screen, screened",
            "branches",
            "kept [2] instead of [1]",
            "1.txt is gone",
            "2.txt is new",
            "mine.txt has changed",
        ];
        assert_eq!(found.len(), expected.len(), "{found:?}");
        assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:?}");
    }
}
