//! Launching runs: one execution of one command in one folder, at most once. The launcher asks, waits and reads the terminal
//! record; the [supervisor](crate::supervisor) starts the command, enforces its limits and writes that record.
//!
//! A run's state is its folder's: a terminal record means it is over, a held lock means it is live, anything else means that it
//! never started or died with its machine. So a launch may be asked for again by anyone at any time, and never starts a second.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::failure::{Class, Context, Failure, Result};
use crate::folder::{self, RunFolder};
use crate::process::{self, Process};
use crate::quantity::{Bytes, Span};

/// The variable that names a run's folder in the environment of all its processes.
pub const RUN_VARIABLE: &str = "HONE_RUN";

/// What a run may inherit of the launching process's environment: what programs need to be found, to find their libraries and to
/// speak the person's language, and no secret.
pub const ALLOWED: [&str; 12] = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TERM",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "NO_COLOR",
];

/// A run to launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// Where its records and logs go, and what the disk limit counts.
    pub folder: PathBuf,
    /// The program and its arguments; no shell reads them.
    pub argv: Vec<String>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Variables beside the allowed ones. They are written to disk: no secrets.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// What ends it from outside.
    #[serde(default)]
    pub limits: Limits,
    /// Cores it is given; what the machine lacks is not waited for.
    #[serde(default = "one")]
    pub cores: usize,
    /// GPUs it is given; likewise.
    #[serde(default)]
    pub gpus: usize,
}

fn one() -> usize {
    1
}

/// Limits on a run's whole process tree. None of them says anything about the candidate's worth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Wall time.
    pub wall: Option<Span>,
    /// Resident memory, summed over the tree.
    pub memory: Option<Bytes>,
    /// Processes at once.
    pub processes: Option<u64>,
    /// Disk taken by the run's folder.
    pub disk: Option<Bytes>,
}

/// Processes that a run may have at most, where nobody says otherwise.
const MOST_PROCESSES: u64 = 512;

impl Limits {
    /// What keeps a run that has lost its head from taking the machine with it: 512 processes, and nine tenths of the memory that the
    /// machine, or the control group around it, has. Limits of time and disk are the caller's.
    pub fn guards() -> Self {
        // A container's limit; the file says `max` where there is none.
        let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
        let memory = machine_memory().into_iter().chain(group).min().map(|bytes| Bytes(bytes / 10 * 9));
        Self { memory, processes: Some(MOST_PROCESSES), ..Self::default() }
    }
}

/// Memory of the machine in bytes, where the system tells.
pub fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Which limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// [`Limits::wall`].
    Wall,
    /// [`Limits::memory`].
    Memory,
    /// [`Limits::processes`].
    Processes,
    /// [`Limits::disk`].
    Disk,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Exit code 0.
    Finished,
    /// Another exit code; 127 where the program could not be started.
    Failed(i32),
    /// Ended from outside for a limit.
    Limit(Limit),
    /// Killed by a signal that Hone did not send.
    Signal(i32),
    /// Ended at the person's request; launching it again resumes it.
    Stopped,
    /// Its supervisor died twice without a record. Not stored: launching it again tries again.
    Lost,
}

/// What is known of a run that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Wall time of the last attempt, in seconds.
    pub wall_s: f64,
    /// CPU time of the last attempt's tree, in seconds.
    pub cpu_s: f64,
    /// The most resident memory seen, summed over the tree, in bytes.
    pub peak_rss: u64,
    /// How often it was started; 1 where nothing died.
    pub attempt: u32,
    /// What to tell people; `None` where it finished.
    pub failure: Option<Failure>,
}

/// A launch or a stop under way.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Where runs are run.
pub trait Launcher: Send + Sync {
    /// Runs `spec` to its end and returns its outcome, the stored one where it is over already. A live run is waited for, a dead one
    /// is started again. Dropping the future leaves the run running.
    ///
    /// # Errors
    /// When the run could not be started or waited for; how the run itself ended is in the outcome.
    fn launch(&self, spec: RunSpec) -> Pending<'_, Outcome>;

    /// Asks the live run of `folder` to save its state and end; false where none is live.
    ///
    /// # Errors
    /// When the run could not be reached.
    fn stop<'a>(&'a self, folder: &'a Path) -> Pending<'a, bool>;
}

/// What this machine can run at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Cores.
    pub cores: usize,
    /// GPUs, named as CUDA_VISIBLE_DEVICES names them.
    pub gpus: Vec<String>,
}

impl Slots {
    /// All cores of this machine and no GPU.
    pub fn all_cores() -> Self {
        Self { cores: std::thread::available_parallelism().map_or(1, usize::from), gpus: Vec::new() }
    }
}

/// Runs on this machine, each under a supervisor process that outlives this one.
pub struct LocalLauncher {
    supervisor: Vec<OsString>,
    slots: Slots,
    cores: Arc<Semaphore>,
    gpus: Arc<Semaphore>,
    free_gpus: Arc<Mutex<Vec<String>>>,
}

/// What a run holds while it runs.
struct Place {
    _permits: [OwnedSemaphorePermit; 2],
    gpus: Vec<String>,
    free_gpus: Arc<Mutex<Vec<String>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.free_gpus.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.gpus);
    }
}

/// What the supervisor is told, in the folder's `spec.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Order {
    pub spec: RunSpec,
    /// The whole environment of the run.
    pub environment: BTreeMap<String, String>,
    pub attempt: u32,
}

impl LocalLauncher {
    /// `supervisor` is the command that reaches [`crate::supervisor::main`] with the order's path as its last argument:
    /// `/proc/self/exe supervise` for a program that dispatches to it.
    pub fn new(supervisor: Vec<OsString>, slots: Slots) -> Self {
        Self {
            supervisor,
            cores: Arc::new(Semaphore::new(slots.cores.max(1))),
            gpus: Arc::new(Semaphore::new(slots.gpus.len())),
            free_gpus: Arc::new(Mutex::new(slots.gpus.clone())),
            slots,
        }
    }

    /// Cores before GPUs, always: two runs cannot each hold what the other waits for.
    async fn place(&self, spec: &RunSpec) -> Result<Place> {
        let (cores, gpus) = (spec.cores.clamp(1, self.slots.cores.max(1)), spec.gpus.min(self.slots.gpus.len()));
        let permits = |semaphore: &Arc<Semaphore>, n: usize| semaphore.clone().acquire_many_owned(n as u32);
        let closed = || "Cannot take a slot".to_string();
        let cores = permits(&self.cores, cores).await.context(Class::Other, closed)?;
        let permit = permits(&self.gpus, gpus).await.context(Class::Other, closed)?;
        let taken = self.free_gpus.lock().unwrap_or_else(PoisonError::into_inner).drain(..gpus).collect();
        Ok(Place { _permits: [cores, permit], gpus: taken, free_gpus: self.free_gpus.clone() })
    }

    async fn run(&self, spec: RunSpec) -> Result<Outcome> {
        let folder = RunFolder::open(&spec.folder)?;
        if let Some(_lock) = folder.try_lock()?
            && let Some(outcome) = terminal(&folder)?.filter(|outcome| outcome.status != Status::Stopped)
        {
            return Ok(outcome);
        }
        let place = self.place(&spec).await?;
        let (mut watched, mut deaths) = (false, 0);
        loop {
            let Some(lock) = folder.try_lock()? else {
                watch(&folder).await?;
                watched = true;
                continue;
            };
            match terminal(&folder)? {
                Some(outcome) if watched || outcome.status != Status::Stopped => return Ok(outcome),
                Some(_) => folder.reopen()?,
                None => {}
            }
            deaths += u32::from(watched);
            if deaths > 1 {
                return Ok(lost(&folder));
            }
            let mut child = self.start(&folder, lock, &spec, &place.gpus).await?;
            child.wait().await.context(Class::Infrastructure, || "Cannot wait for a supervisor".into())?;
            watched = true;
        }
    }

    /// Starts a supervisor with the lock as its standard input: the lock is never free between here and there.
    async fn start(&self, folder: &RunFolder, lock: File, spec: &RunSpec, gpus: &[String]) -> Result<Child> {
        let before = folder::read_json::<Order>(&folder.spec()).ok().flatten();
        if before.is_some() {
            clear_remains(folder).await?;
        }
        let attempt = before.map_or(1, |order| order.attempt + 1);
        let spec = RunSpec { folder: folder.path().to_path_buf(), ..spec.clone() };
        let order = Order { environment: environment(&spec, gpus), spec, attempt };
        folder::write_json(&folder.spec(), &order)?;
        let cannot = || format!("Cannot start the supervisor of {}", folder.path().display());
        lock.set_len(0).context(Class::Infrastructure, cannot)?;
        let log = File::options().create(true).append(true).open(folder.supervisor_log());
        let (program, arguments) =
            self.supervisor.split_first().ok_or_else(|| Failure::new(Class::Other, "No supervisor is named."))?;
        let mut command = Command::new(program);
        command.args(arguments).arg(folder.spec());
        command.env_clear().envs(allowed());
        command.stdin(lock).stdout(Stdio::null()).stderr(log.context(Class::Infrastructure, cannot)?);
        // A session of its own, so that neither Ctrl-C nor a closed terminal reaches it.
        // SAFETY: setsid is async-signal-safe and allocates nothing.
        unsafe { command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into)) };
        command.spawn().context(Class::Infrastructure, cannot)
    }
}

impl Launcher for LocalLauncher {
    fn launch(&self, spec: RunSpec) -> Pending<'_, Outcome> {
        Box::pin(self.run(spec))
    }

    fn stop<'a>(&'a self, folder: &'a Path) -> Pending<'a, bool> {
        Box::pin(async move {
            let folder = RunFolder::open(folder)?;
            let Some(supervisor) = supervisor(&folder).await? else { return Ok(false) };
            supervisor.signal(Signal::SIGTERM).context(Class::Infrastructure, || "Cannot stop a run".into())?;
            Ok(true)
        })
    }
}

fn allowed() -> impl Iterator<Item = (String, String)> {
    ALLOWED.iter().filter_map(|name| Some((name.to_string(), std::env::var(name).ok()?)))
}

fn environment(spec: &RunSpec, gpus: &[String]) -> BTreeMap<String, String> {
    let own = [
        (RUN_VARIABLE, spec.folder.display().to_string()),
        ("CUDA_VISIBLE_DEVICES", gpus.join(",")),
        // For programs other than Hone's own: what their thread pools ask first.
        ("OMP_NUM_THREADS", spec.cores.max(1).to_string()),
        ("RAYON_NUM_THREADS", spec.cores.max(1).to_string()),
    ];
    let own = own.map(|(name, value)| (name.to_string(), value));
    allowed().chain(own).chain(spec.env.clone()).collect()
}

fn terminal(folder: &RunFolder) -> Result<Option<Outcome>> {
    folder::read_json(&folder.outcome())
}

/// The live supervisor, by what it wrote into the lock file; `None` once the lock is free.
async fn supervisor(folder: &RunFolder) -> Result<Option<Process>> {
    loop {
        let text = std::fs::read_to_string(folder.lock_file()).unwrap_or_default();
        let holder = Process::recall(&text);
        if folder.try_lock()?.is_some() {
            return Ok(None);
        }
        if holder.is_some() {
            return Ok(holder);
        }
        // Locked a moment ago, and not signed yet.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the live run of `folder` is over.
async fn watch(folder: &RunFolder) -> Result<()> {
    let Some(supervisor) = supervisor(folder).await? else { return Ok(()) };
    let cannot = || format!("Cannot watch the run of {}", folder.path().display());
    let Ok(pidfd) = process::pidfd(supervisor.pid) else { return Ok(()) };
    // The id may have passed to another process before the descriptor was made.
    if supervisor.lives() {
        // SAFETY: the descriptor is owned by what is registered, and stays open until that is dropped.
        let ended = unsafe { AsyncFd::register(pidfd) }.context(Class::Infrastructure, cannot)?;
        ended.readable().await.context(Class::Infrastructure, cannot)?.retain_ready();
    }
    Ok(())
}

/// Kills what a dead supervisor left of its tree: its direct child died with it, others are known by their environment. A process
/// in the middle of an exec shows none for a moment, so that only a second look that finds nothing is believed.
async fn clear_remains(folder: &RunFolder) -> Result<()> {
    let mut clean = 0;
    for _ in 0..500 {
        let mut remains = process::with_environment(RUN_VARIABLE, folder.path());
        remains.retain(|process| !process.zombie);
        clean = if remains.is_empty() { clean + 1 } else { 0 };
        if clean == 2 {
            return Ok(());
        }
        for process in remains {
            process.signal(Signal::SIGKILL).context(Class::Infrastructure, || "Cannot end a run's remains".into())?;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let message = format!("Processes of a dead run do not end: {}.", folder.path().display());
    let hint = "they may wait for a disk or a device that does not answer; restart the machine";
    Err(Failure::new(Class::Infrastructure, message).hint(hint))
}

fn lost(folder: &RunFolder) -> Outcome {
    let attempt = folder::read_json::<Order>(&folder.spec()).ok().flatten().map_or(0, |order| order.attempt);
    let words = quoted(&folder::tail(&folder.supervisor_log(), 1000));
    let failure =
        Failure::new(Class::Infrastructure, format!("The run's supervisor died twice without a record.{words}"))
            .hint("the machine may be out of memory; launching the run again tries again");
    Outcome { status: Status::Lost, wall_s: 0.0, cpu_s: 0.0, peak_rss: 0, attempt, failure: Some(failure) }
}

/// Text of a run as a quotation under a sentence; nothing where there is no text.
pub(crate) fn quoted(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    match lines.is_empty() {
        true => String::new(),
        false => format!(" It said last:\n> {}", lines[lines.len().saturating_sub(20)..].join("\n> ")),
    }
}
