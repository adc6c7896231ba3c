//! Processes as Linux shows them: the tree below a process, its memory, and signals that cannot hit a stranger. Only what the
//! supervisor, the launcher and the self-test need; processes are known by id and start time, so that a reused id is never taken for the old one.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::libc;
use nix::sys::signal::Signal;

use crate::launcher::RUN_VARIABLE;

/// One process, as `/proc/<pid>/stat` describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its parent's id.
    pub parent: i32,
    /// Clock ticks since boot at which it started: with the id, its identity.
    pub start: u64,
    /// Resident memory in bytes.
    pub resident: u64,
    /// It has ended and waits for its parent to notice.
    pub zombie: bool,
}

impl Process {
    /// The process with this id, if there is one.
    pub fn find(pid: i32) -> Option<Self> {
        Self::parse(pid, &std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The process that [`Self::identity`] named, while it is there.
    pub fn recall(identity: &str) -> Option<Self> {
        let (pid, start) = identity.trim().split_once(' ')?;
        Self::find(pid.parse().ok()?).filter(|process| start.parse() == Ok(process.start))
    }

    /// What tells it from every other process since the machine started: its id and start time.
    pub fn identity(self) -> String {
        format!("{} {}\n", self.pid, self.start)
    }

    /// Whether it is still there, and no other process in its place.
    pub fn lives(self) -> bool {
        Self::find(self.pid).is_some_and(|now| now.start == self.start)
    }

    /// The name in parentheses may hold spaces and parentheses itself, so fields are counted from its last.
    fn parse(pid: i32, stat: &str) -> Option<Self> {
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        // Field n of proc_pid_stat(5) is at n − 3 here.
        Some(Self {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            start: number(19)?,
            resident: number(21)? * page_size(),
            zombie: fields[0] == "Z" || fields[0] == "X",
        })
    }

    /// Sends `signal` to this very process: through a pidfd, after checking that the id still means it. A process that is gone is
    /// no error.
    pub fn signal(self, signal: Signal) -> io::Result<()> {
        let pidfd = match pidfd(self.pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
            other => other?,
        };
        if !self.lives() {
            return Ok(());
        }
        // SAFETY: the descriptor is open, no siginfo is passed, and the kernel takes no other pointer.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                pidfd.as_raw_fd(),
                signal as libc::c_int,
                std::ptr::null::<()>(),
                0,
            )
        };
        match sent {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error())
                .or_else(|e| if e.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(e) }),
        }
    }
}

fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// A descriptor of a process that becomes readable when it ends.
pub(crate) fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers; the descriptor it returns is ours alone.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Every process below `root`, itself left out. Below a child subreaper that is every process that `root` has ever caused: a
/// process whose parent dies is handed to it, whatever session or group it has made for itself.
pub(crate) fn descendants(root: i32) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in pids().filter_map(Process::find) {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = children.remove(&root).unwrap_or_default();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        found.extend(children.remove(&process.pid).unwrap_or_default());
        next += 1;
    }
    found
}

/// The processes of all runs below `folder`, whoever started them, their supervisors included.
pub fn of_runs(folder: &Path) -> Vec<Process> {
    let within = [folder.as_os_str().as_encoded_bytes(), b"/"].concat();
    let variable = [RUN_VARIABLE.as_bytes(), b"=", &within].concat();
    let mut found = whose("environ", |entry| entry.starts_with(&variable));
    // A supervisor is named by its specification alone.
    for supervisor in whose("cmdline", |argument| argument.starts_with(&within)) {
        if !found.contains(&supervisor) {
            found.push(supervisor);
        }
    }
    found
}

/// Every process whose environment at its start had `variable` set to `value`.
pub(crate) fn with_environment(variable: &str, value: &Path) -> Vec<Process> {
    let whole = [variable.as_bytes(), b"=", value.as_os_str().as_encoded_bytes()].concat();
    whose("environ", |entry| entry == whole)
}

/// Every process with an entry in its `/proc` file `name` (entries end in zeros) of which `holds` is true.
fn whose(name: &str, holds: impl Fn(&[u8]) -> bool) -> Vec<Process> {
    let carries = |pid: &i32| {
        let entries = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        entries.split(|byte| *byte == 0).any(&holds)
    };
    pids().filter(carries).filter_map(Process::find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn stat_is_parsed_whatever_the_name() {
        let rest = "S 7 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 1000 3 0";
        let process = Process::parse(9, &format!("9 (a) b) ( c) {rest}")).unwrap();
        assert_eq!((process.parent, process.start, process.resident), (7, 4242, 3 * page_size()));
        assert_eq!(Process::parse(9, "9 (a) S"), None);
    }

    #[test]
    fn a_tree_holds_grandchildren_and_ends_at_its_root() {
        let mut child =
            Command::new("sh").args(["-c", "sleep 100 & echo; wait"]).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Read::read(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let shell = child.id() as i32;
        let below = descendants(shell);
        assert_eq!(below.len(), 1);
        assert_eq!(below[0].parent, shell);
        assert!(descendants(std::process::id() as i32).iter().any(|process| process.pid == below[0].pid));
        below[0].signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_reused_id_is_not_signalled() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let process = Process::find(child.id() as i32).unwrap();
        assert_eq!(Process::recall(&process.identity()).map(|found| found.start), Some(process.start));
        assert_eq!(Process::recall(&format!("{} {}", process.pid, process.start + 1)), None);
        Process { start: process.start + 1, ..process }.signal(Signal::SIGKILL).unwrap();
        assert!(child.try_wait().unwrap().is_none());
        process.signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        process.signal(Signal::SIGKILL).unwrap();
    }

    #[test]
    fn processes_are_found_by_their_environment() {
        let mark = tempfile::tempdir().unwrap();
        let mut child = Command::new("sleep").arg("100").env("HONE_RUN", mark.path()).spawn().unwrap();
        // It shows no environment until its exec is through, a moment after spawn returns.
        let found =
            (0..1000).map(|_| with_environment("HONE_RUN", mark.path())).find(|found| !found.is_empty()).unwrap();
        assert_eq!(found.iter().map(|process| process.pid).collect::<Vec<_>>(), [child.id() as i32]);
        assert!(with_environment("HONE_RUN", Path::new("/elsewhere")).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
