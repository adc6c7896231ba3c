//! A control group (version 2) for one run, where this machine lets us make one: a hard limit of memory and processes, and a kill
//! that no fork outruns. Where there is none, the supervisor's own watching is what there is.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A group of Hone's own making, removed when dropped.
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes the group of the run folder that `lock` locks, below this process's own group. Whoever is still in it is of an
    /// attempt whose supervisor died, and is killed first. `None` where groups cannot be made, which is common.
    pub fn create(lock: &fs::Metadata, memory: Option<u64>, processes: Option<u64>) -> Option<Self> {
        let path =
            own(&fs::read_to_string("/proc/self/mountinfo").ok()?, &fs::read_to_string("/proc/self/cgroup").ok()?)?;
        // The lock's file is the run's identity, whatever mounts and links lead to it.
        let path = path.join(format!("hone-{:x}-{:x}", lock.dev(), lock.ino()));
        if let Err(error) = fs::create_dir(&path)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return None;
        }
        let group = Self { path };
        group.kill();
        let limit = |value: Option<u64>| value.map_or("max".to_string(), |value| value.to_string());
        // Each of these files is there only where its controller was delegated to us.
        let _ = group.write("memory.max", &limit(memory));
        let _ = group.write("memory.swap.max", if memory.is_some() { "0" } else { "max" });
        let _ = group.write("pids.max", &limit(processes));
        Some(group)
    }

    /// The file through which a process joins by writing `0`.
    pub fn door(&self) -> io::Result<fs::File> {
        fs::OpenOptions::new().write(true).open(self.path.join("cgroup.procs"))
    }

    /// Kills all members at once (Linux 5.14).
    pub fn kill(&self) {
        let _ = self.write("cgroup.kill", "1");
    }

    /// Whether the kernel killed a member for memory, or refused one a process.
    pub fn reached(&self) -> (bool, bool) {
        let counted = |file: &str, event: &str| {
            let text = fs::read_to_string(self.path.join(file)).unwrap_or_default();
            text.lines().any(|line| line.strip_prefix(event).is_some_and(|count| count.trim() != "0"))
        };
        (counted("memory.events", "oom_kill "), counted("pids.events", "max "))
    }

    /// The most memory that the group ever used, in bytes, where the kernel counts it.
    pub fn peak(&self) -> Option<u64> {
        fs::read_to_string(self.path.join("memory.peak")).ok()?.trim().parse().ok()
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::OpenOptions::new().write(true).open(self.path.join(file))?.write_all(text.as_bytes())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// The folder of this process's version-2 group, from the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn own(mounts: &str, groups: &str) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    // mount id, parent, device, root, mount point, …
    let mut fields = mount.split(' ').skip(3);
    let (root, point) = (fields.next()?, fields.next()?);
    let inside = Path::new(group).strip_prefix(root).ok()?;
    Some(Path::new(point).join(inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_below_its_mount() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(own(mounts, "1:cpu:/x\n0::/user.slice\n"), Some("/sys/fs/cgroup/unified/user.slice".into()));
        let container = "31 30 0:27 /docker/7 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
        assert_eq!(own(container, "0::/docker/7/inner"), Some("/sys/fs/cgroup/inner".into()));
        assert_eq!(own("", "0::/"), None);
        assert_eq!(own(mounts, "1:cpu:/x"), None);
    }
}
