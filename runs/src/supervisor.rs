//! The supervisor: a small process of its own above each run. It starts the run, enforces its limits from outside on the whole
//! process tree, ends only what it started, and writes the terminal record. It outlives the program that launched it.
//!
//! It is a child subreaper, so that whatever the run forks stays below it, and it holds the folder's lock as its standard input.
//! One thread, which waits for signals and a tick: the parent-death signal of its child follows the thread that forked.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::resource::{Resource, UsageWho, getrusage, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::cgroup::Cgroup;
use crate::failure::{Class, Context, Failure, Result};
use crate::folder::{self, RunFolder};
use crate::launcher::{Limit, Limits, Order, Outcome, Status, quoted};
use crate::process::{Process, descendants};

/// How often the tree is looked at, at most: a look may cost a twentieth of the time at most.
const TICK: Duration = Duration::from_millis(100);
/// How often the folder's size is added up, likewise.
const DISK_TICK: Duration = Duration::from_secs(1);
/// How long a run that is asked to stop may take to save its state.
const GRACE: Duration = Duration::from_secs(20);
/// How much of the run's standard error a failure quotes, in bytes.
const QUOTE: u64 = 2000;

/// Carries out the order at `spec_path` (a run folder's `spec.json`) and writes the folder's terminal record. The caller's standard
/// input must be the folder's lock.
pub fn main(spec_path: &Path) -> ExitCode {
    match supervise(spec_path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.class.exit_code())
        }
    }
}

fn supervise(spec_path: &Path) -> Result<()> {
    let order: Order = folder::read_json(spec_path)?
        .ok_or_else(|| Failure::new(Class::Usage, format!("There is no order at {}.", spec_path.display())))?;
    let folder = RunFolder::open(&order.spec.folder)?;
    let lock = hold_lock(&folder)?;
    let system = |error: Errno| Failure::new(Class::Infrastructure, format!("Cannot supervise: {error}."));

    // Blocked signals wait in the descriptor. Closed terminals are none of our business.
    let mut handled = SigSet::empty();
    [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]
        .into_iter()
        .for_each(|signal| handled.add(signal));
    handled.thread_block().map_err(system)?;
    let signals = SignalFd::with_flags(&handled, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(system)?;
    nix::sys::prctl::set_child_subreaper(true).map_err(system)?;

    let limits = order.spec.limits;
    let group = Cgroup::create(&lock, limits.memory.map(|bytes| bytes.0), limits.processes);
    let started = Instant::now();
    let child = match start(&order, &folder, group.as_ref()) {
        Ok(child) => child,
        Err(error) => {
            let message = format!(
                "The run's program `{}` cannot be started: {error}.",
                order.spec.argv.first().map_or("", |name| name)
            );
            let failure =
                Failure::new(Class::Candidate, message).hint("check that the program exists and may be executed");
            return record(&folder, &order, Status::Failed(127), started, 0, Some(failure));
        }
    };
    let mut tree = Tree { root: child, group, signals, limits, started, peak: 0, exit: None, stop: None };
    let status = tree.watch(folder.path());
    tree.end();
    let (memory, processes) = tree.group.as_ref().map_or((false, false), Cgroup::reached);
    let status = match status {
        Status::Signal(libc::SIGKILL) if memory => Status::Limit(Limit::Memory),
        Status::Failed(_) | Status::Signal(_) if processes => Status::Limit(Limit::Processes),
        other => other,
    };
    let peak = tree.peak.max(tree.group.as_ref().and_then(Cgroup::peak).unwrap_or(0));
    let failure = failure(status, &limits, &folder);
    record(&folder, &order, status, started, peak, failure)
}

/// Makes sure that standard input is the folder's lock, held, and signs it with this process's identity.
fn hold_lock(folder: &RunFolder) -> Result<std::fs::Metadata> {
    let cannot = || format!("Cannot hold the lock of {}", folder.path().display());
    let mut lock = File::from(io::stdin().as_fd().try_clone_to_owned().context(Class::Infrastructure, cannot)?);
    let held = lock.metadata().context(Class::Infrastructure, cannot)?;
    let named = folder.lock_file().metadata().context(Class::Infrastructure, cannot)?;
    if (held.dev(), held.ino()) != (named.dev(), named.ino()) || lock.try_lock().is_err() {
        return Err(Failure::new(
            Class::Usage,
            "A supervisor is started by a launcher, which hands it the run folder's lock.",
        ));
    }
    let own = Process::find(std::process::id() as i32).map(Process::identity).unwrap_or_default();
    lock.seek(SeekFrom::Start(0))
        .and_then(|_| lock.write_all(own.as_bytes()))
        .context(Class::Infrastructure, cannot)?;
    Ok(held)
}

/// Starts the run itself; its id.
fn start(order: &Order, folder: &RunFolder, group: Option<&Cgroup>) -> io::Result<i32> {
    let log = |path| File::options().create(true).append(true).open(path);
    let (program, arguments) = order.spec.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let door = group.and_then(|group| group.door().ok());
    let mut command = Command::new(program);
    command.args(arguments).current_dir(&order.spec.cwd).env_clear().envs(&order.environment);
    command.stdin(Stdio::null()).stdout(log(folder.stdout())?).stderr(log(folder.stderr())?).process_group(0);
    let supervisor = nix::unistd::getpid();
    // SAFETY: only system calls, nothing allocated, no lock taken.
    unsafe {
        command.pre_exec(move || {
            if let Some(door) = &door {
                let _ = nix::unistd::write(door, b"0");
            }
            setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            // The supervisor may have died before the line above.
            if nix::unistd::getppid() == supervisor { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
        });
    }
    let child = i32::try_from(command.spawn()?.id()).map_err(io::Error::other)?;
    // Where memory runs out, the kernel should end the run and not its supervisor. Refused by some containers.
    let _ = std::fs::write(format!("/proc/{child}/oom_score_adj"), "500");
    Ok(child)
}

/// The run and everything below it.
struct Tree {
    root: i32,
    group: Option<Cgroup>,
    signals: SignalFd,
    limits: Limits,
    started: Instant,
    /// The most resident memory seen, in bytes.
    peak: u64,
    /// How the root ended, once it has.
    exit: Option<Status>,
    /// When the run was asked to stop.
    stop: Option<Instant>,
}

impl Tree {
    /// Waits for the root's end or a limit.
    fn watch(&mut self, folder: &Path) -> Status {
        let (mut next_look, mut next_disk) = (Instant::now(), Instant::now());
        loop {
            self.take_signals();
            self.reap();
            if let Some(status) = self.exit {
                return if self.stop.is_some() { Status::Stopped } else { status };
            }
            let now = Instant::now();
            if self.stop.is_some_and(|asked| now - asked >= GRACE) {
                return Status::Stopped;
            }
            if self.limits.wall.is_some_and(|limit| now - self.started >= limit.duration()) {
                return Status::Limit(Limit::Wall);
            }
            if now >= next_look {
                if let Some(limit) = self.look() {
                    return Status::Limit(limit);
                }
                next_look = now + TICK.max(20 * now.elapsed());
            }
            if let (Some(limit), true) = (self.limits.disk, now >= next_disk) {
                let before = Instant::now();
                if disk_usage(folder) > limit.0 {
                    return Status::Limit(Limit::Disk);
                }
                next_disk = now + DISK_TICK.max(20 * before.elapsed());
            }
            let deadline = self.limits.wall.map(|limit| self.started + limit.duration());
            let until = deadline.map_or(next_look, |deadline| deadline.min(next_look));
            self.wait_for_signal(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Adds up the tree's processes and memory; a limit that is passed.
    fn look(&mut self) -> Option<Limit> {
        let tree = descendants(std::process::id() as i32);
        let resident = tree.iter().map(|process| process.resident).sum();
        let living = tree.iter().filter(|process| !process.zombie).count() as u64;
        self.peak = self.peak.max(resident);
        if self.limits.memory.is_some_and(|limit| resident > limit.0) {
            return Some(Limit::Memory);
        }
        self.limits.processes.is_some_and(|limit| living > limit).then_some(Limit::Processes)
    }

    /// The first request to stop is passed on to the run; a second one does not wait for it.
    fn take_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if ![libc::SIGTERM, libc::SIGINT].contains(&(signal.ssi_signo as i32)) {
                continue;
            }
            match self.stop {
                None => {
                    self.stop = Some(Instant::now());
                    let _ = Process::find(self.root).map(|root| root.signal(Signal::SIGTERM));
                }
                Some(_) => self.stop = Instant::now().checked_sub(GRACE),
            }
        }
    }

    /// Reaps all that has ended: the root, and orphans that came to us. False once no child is left.
    fn reap(&mut self) -> bool {
        loop {
            let (pid, status) = match waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, 0)) => (pid, Status::Finished),
                Ok(WaitStatus::Exited(pid, code)) => (pid, Status::Failed(code)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, Status::Signal(signal as i32)),
                Ok(WaitStatus::StillAlive) => return true,
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(_) => return false,
            };
            if pid.as_raw() == self.root {
                self.exit = Some(status);
            }
        }
    }

    fn wait_for_signal(&self, time: Duration) {
        let mut waited = libc::pollfd { fd: self.signals.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // Rounded up: a wait of 0 would spin until the deadline.
        let milliseconds = i32::try_from(time.as_millis() + 1).unwrap_or(i32::MAX);
        // SAFETY: one initialised entry is passed and its count is 1.
        unsafe { libc::poll(&raw mut waited, 1, milliseconds) };
    }

    /// Kills what is left of the tree, until nothing is. A process that a disk or device holds in the kernel is given up on after a
    /// while: it cannot run again.
    fn end(&mut self) {
        let given_up = Instant::now() + Duration::from_secs(30);
        while self.reap() && Instant::now() < given_up {
            if let Some(group) = &self.group {
                group.kill();
            }
            for process in descendants(std::process::id() as i32).into_iter().filter(|process| !process.zombie) {
                if let Err(error) = process.signal(Signal::SIGKILL) {
                    eprintln!("Cannot kill process {}: {error}.", process.pid);
                }
            }
            while let Ok(Some(_)) = self.signals.read_signal() {}
            if self.reap() {
                self.wait_for_signal(Duration::from_millis(20));
            }
        }
    }
}

/// Disk taken by everything in `folder`, in bytes; links are not followed.
fn disk_usage(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(data) if data.is_dir() => disk_usage(&entry.path()),
        Ok(data) => data.blocks() * 512,
        Err(_) => 0,
    });
    sizes.sum()
}

/// What to tell people of how the run ended.
fn failure(status: Status, limits: &Limits, folder: &RunFolder) -> Option<Failure> {
    let words = || quoted(&folder::tail(&folder.stderr(), QUOTE));
    let reached = |what: String, hint: &str| {
        Some(
            Failure::new(Class::Budget, format!("The run reached its limit of {what} and was ended.{}", words()))
                .hint(hint),
        )
    };
    match status {
        Status::Finished => None,
        Status::Failed(code) => {
            let message = format!("The run ended with exit code {code}.{}", words());
            Some(
                Failure::new(Class::of_run(code), message)
                    .hint("its folder holds the whole of stdout.log and stderr.log"),
            )
        }
        Status::Signal(signal) => {
            let name = Signal::try_from(signal).map_or("an unknown signal", Signal::as_str);
            let failure =
                |class, hint: &str| Failure::new(class, format!("The run was killed by {name}.{}", words())).hint(hint);
            Some(match Signal::try_from(signal) {
                Ok(Signal::SIGKILL) => failure(
                    Class::Infrastructure,
                    "nothing of Hone's sent it: the kernel does so where memory runs out (see dmesg)",
                ),
                Ok(Signal::SIGINT) => failure(Class::Interrupted, "launch it again to resume it"),
                Ok(Signal::SIGTERM | Signal::SIGHUP) => failure(Class::Terminated, "launch it again to resume it"),
                _ => failure(Class::Candidate, "the program crashed; its folder holds the whole of stderr.log"),
            })
        }
        Status::Limit(Limit::Wall) => reached(
            format!("{} of wall time", limits.wall.unwrap_or_default()),
            "raise `runs.timeout`, or make the run smaller",
        ),
        Status::Limit(Limit::Memory) => reached(
            format!("{} of memory", limits.memory.unwrap_or_default()),
            "raise the memory limit, or make the batch smaller",
        ),
        Status::Limit(Limit::Processes) => reached(
            format!("{} processes", limits.processes.unwrap_or_default()),
            "raise the limit, or start fewer processes",
        ),
        Status::Limit(Limit::Disk) => reached(
            format!("{} of disk", limits.disk.unwrap_or_default()),
            "raise the limit, or keep fewer checkpoints",
        ),
        Status::Stopped => {
            Some(Failure::new(Class::Terminated, "The run was stopped.").hint("launch it again to resume it"))
        }
        Status::Lost => None,
    }
}

fn record(
    folder: &RunFolder,
    order: &Order,
    status: Status,
    started: Instant,
    peak: u64,
    failure: Option<Failure>,
) -> Result<()> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context(Class::Infrastructure, || "Cannot read usage".into())?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    // A run shorter than a tick was never looked at, but the kernel kept its largest process's peak (in KiB).
    let largest = u64::try_from(usage.max_rss()).unwrap_or(0) * 1024;
    let outcome = Outcome {
        status,
        wall_s: started.elapsed().as_secs_f64(),
        cpu_s: seconds(usage.user_time()) + seconds(usage.system_time()),
        peak_rss: peak.max(largest),
        attempt: order.attempt,
        failure,
    };
    folder::write_json(&folder.outcome(), &outcome)
}
