//! A run's folder: its files by name, its lock, and the writing of files that are either whole or not there. Knows nothing of
//! what runs in it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::{Class, Context, Failure, Result};

/// Writes `bytes` to `path` as a whole: under a temporary name, to disk, then renamed. Missing folders are made.
///
/// # Errors
/// [`Class::Infrastructure`] where the disk refuses.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let write = || {
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::Builder::new().prefix(".hone-").permissions(readable()).tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        // The rename itself is durable only once the folder is on disk.
        File::open(folder)?.sync_all()
    };
    write().context(Class::Infrastructure, || format!("Cannot write {}", path.display()))
}

/// Temporary files are private by default; these become ordinary files.
fn readable() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o644)
}

/// Writes `value` as indented JSON, as a whole.
///
/// # Errors
/// As [`write_atomic`].
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text =
        serde_json::to_vec_pretty(value).context(Class::Other, || format!("Cannot encode {}", path.display()))?;
    text.push(b'\n');
    write_atomic(path, &text)
}

/// Reads JSON that [`write_json`] wrote; `None` where there is no such file.
///
/// # Errors
/// [`Class::Infrastructure`] where it cannot be read, [`Class::Integrity`] where it is damaged.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(Failure::new(Class::Infrastructure, format!("Cannot read {}: {error}.", path.display())));
        }
    };
    let value = serde_json::from_slice(&text).map_err(|error| {
        Failure::new(Class::Integrity, format!("This file is damaged: {error}."))
            .hint("restore it from a copy, or remove it to make it anew")
            .at(format!("{}:{}:{}", path.display(), error.line(), error.column()))
    })?;
    Ok(Some(value))
}

/// The last `limit` bytes of a text file, from the start of a line where that leaves any, control characters other than newline
/// and tab replaced: text of a run is quoted data, and must not drive a terminal. Empty where there is no such file.
pub fn tail(path: &Path, limit: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(limit)))?;
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes)?;
        if length > limit {
            let line = bytes.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            if line < bytes.len() {
                bytes.drain(..line);
            }
        }
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let safe = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    String::from_utf8_lossy(&bytes).chars().filter(|c| *c != '\r').map(safe).collect()
}

/// The folder of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Opens the folder at `path`, made where it is missing. The path becomes absolute.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where it cannot be made.
    pub fn open(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path)
            .and_then(|()| path.canonicalize())
            .map(|path| Self { path })
            .context(Class::Infrastructure, || format!("Cannot make the run folder {}", path.display()))
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// What the run is: written by whoever describes it, before it starts.
    pub fn manifest(&self) -> PathBuf {
        self.path.join("manifest.json")
    }
    /// What was asked of the launcher.
    pub fn spec(&self) -> PathBuf {
        self.path.join("spec.json")
    }
    /// The terminal record: where it stands, the run is over and is never started again.
    pub fn outcome(&self) -> PathBuf {
        self.path.join("outcome.json")
    }
    /// The run's standard output.
    pub fn stdout(&self) -> PathBuf {
        self.path.join("stdout.log")
    }
    /// The run's standard error.
    pub fn stderr(&self) -> PathBuf {
        self.path.join("stderr.log")
    }
    /// What the run's supervisor had to say for itself; empty where all went well.
    pub fn supervisor_log(&self) -> PathBuf {
        self.path.join("supervisor.log")
    }
    /// The lock that a live run holds.
    pub fn lock_file(&self) -> PathBuf {
        self.path.join("lock")
    }

    /// Moves the terminal record aside, so that a launch starts the run again: for failures of the infrastructure, which say
    /// nothing about the run. Nothing happens where there is none.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where it cannot be moved.
    pub fn reopen(&self) -> Result<()> {
        let aside = |n: u32| self.path.join(format!("outcome-{n}.json"));
        let free = (1..).map(aside).find(|path| !path.exists()).unwrap_or_else(|| aside(0));
        match std::fs::rename(self.outcome(), free) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Failure::new(Class::Infrastructure, format!("Cannot reopen {}: {error}.", self.path.display())))
            }
            _ => Ok(()),
        }
    }

    /// Takes the folder's lock; `None` while another process holds it. The lock is advisory (`flock`), belongs to the open file
    /// and ends with the last process that has it open, however that process dies.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where the lock file cannot be opened or locked.
    pub fn try_lock(&self) -> Result<Option<File>> {
        let cannot = || format!("Cannot lock {}", self.path.display());
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(self.lock_file());
        let file = open.context(Class::Infrastructure, cannot)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error).context(Class::Infrastructure, cannot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/file.json");
        write_json(&path, &[1, 2]).unwrap();
        write_json(&path, &[3]).unwrap();
        assert_eq!(read_json::<Vec<u8>>(&path).unwrap(), Some(vec![3]));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
        assert_eq!(read_json::<Vec<u8>>(&dir.path().join("none")).unwrap(), None);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, "[1,\n2").unwrap();
        let failure = read_json::<Vec<u8>>(&path).unwrap_err();
        assert_eq!((failure.class, failure.at), (Class::Integrity, Some(format!("{}:2:1", path.display()))));
    }

    #[test]
    fn the_lock_is_held_once_and_ends_with_its_holder() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path()).unwrap();
        let held = folder.try_lock().unwrap();
        assert!(held.is_some());
        assert!(folder.try_lock().unwrap().is_none());
        drop(held);
        assert!(folder.try_lock().unwrap().is_some());
    }

    #[test]
    fn a_tail_is_bounded_whole_lines_without_escapes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "first line\nsecond \x1b[31mline\r\nthird\n").unwrap();
        assert_eq!(tail(&path, 1000), "first line\nsecond \u{fffd}[31mline\nthird\n");
        assert_eq!(tail(&path, 10), "third\n");
        assert_eq!(tail(&dir.path().join("none"), 10), "");
    }

    #[test]
    fn reopening_keeps_the_old_record() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path()).unwrap();
        folder.reopen().unwrap();
        for _ in 0..2 {
            std::fs::write(folder.outcome(), "{}").unwrap();
            folder.reopen().unwrap();
        }
        assert!(!folder.outcome().exists());
        assert!(dir.path().join("outcome-1.json").exists() && dir.path().join("outcome-2.json").exists());
    }
}
