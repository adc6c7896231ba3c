//! A disk that is full: a small file system in memory, seen by this process and its children alone, and ballast that fills it.

use super::{Chaos, Outcome, See, kill_runs, share, start};
use hone_runs::failure::Context;
use hone_runs::{Class, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Makes `folder` a disk of 64 MiB, in a user and mount namespace of this process's own, so that no privilege is needed and nobody
/// else sees it. To be called before the process has a second thread.
///
/// # Errors
/// Where the kernel or its settings do not allow such namespaces.
pub fn enter_small_disk(folder: &Path) -> Result<()> {
    let (user, group) = (nix::unistd::getuid(), nix::unistd::getgid());
    let enter = || -> std::io::Result<()> {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("size=64m"))?;
        Ok(())
    };
    enter().context(Class::Infrastructure, || "A small disk of this process's own cannot be made".into())
}

impl Chaos {
    /// Fills the disk at random instants of a campaign's lives, and frees it again for the next.
    pub(super) fn fill(&self, outcome: &mut Outcome, see: See) -> Result<()> {
        let mut draw = hone_runs::draws(self.seed, "chaos: disks", 0, 0);
        let ballast = self.folder.join("ballast");
        outcome.campaigns = 1;
        let folder = self.copy("disk")?;
        for _ in 0..12 {
            see(&format!("full disk {}", outcome.faults + 1));
            let mut life = start(&mut self.command(&folder)?)?;
            let ended = self.ends_within(&mut life, share(&mut draw))?;
            if ended.is_none() {
                fill(&ballast)?;
                outcome.faults += 1;
                // It meets the full disk, or is done with what needs none.
                self.ends_within(&mut life, 1.0)?;
                std::thread::sleep(Duration::from_millis(50));
                let _ = life.kill();
                let _ = life.wait();
                kill_runs(&folder)?;
                fs::remove_file(&ballast).context(Class::Infrastructure, || "The ballast stays".into())?;
            } else if ended.is_some_and(|status| status.success()) {
                break;
            }
        }
        self.finish(&folder, outcome)
    }
}

/// Writes until nothing fits any more, to the last byte.
fn fill(ballast: &Path) -> Result<()> {
    let mut file = File::create(ballast).context(Class::Infrastructure, || "The ballast cannot be written".into())?;
    let mut block = vec![0; 1 << 20];
    while !block.is_empty() {
        if file.write_all(&block).is_err() {
            block.truncate(block.len() / 2);
        }
    }
    Ok(())
}
