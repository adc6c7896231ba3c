//! The person's git repository as a campaign sees it: commits, their trees, and the two ignored folders that are Hone's own. It reads the
//! repository and writes nothing in it; branches are written by [`crate::branch`].

use git2::{FileMode, ObjectType, Oid, Repository, TreeWalkMode, TreeWalkResult};
use hone_runs::{Class, Failure, Result, failure::Context};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};

/// A git repository that holds a goal. Cheap to clone; the repository is opened anew for each use, so threads may share it.
#[derive(Clone, Debug)]
pub struct Workspace {
    root: PathBuf,
}

/// A file of a commit's tree: its mode and the id of its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeFile {
    /// Git's mode: 0o100644, 0o100755 or 0o120000 (a symbolic link).
    pub mode: i32,
    /// The id of the blob.
    pub blob: Oid,
}

/// Held while one driver runs a campaign, or one process decides. Released when dropped, and by the kernel when its process dies.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// A folder for a moment's work.
pub(crate) struct Scratch {
    folder: tempfile::TempDir,
    _lock: File,
}

impl Scratch {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// How scratch folders and half-written exports are called, and the lock under which the former are made and swept.
const SCRATCH: &str = "scratch-";
const EXPORTING: &str = ".exporting-";
const SWEEPING: &str = "scratch";

impl Workspace {
    /// The repository around `start`, a file or folder.
    ///
    /// # Errors
    /// `Usage` when there is none, or it has no working tree.
    pub fn discover(start: &Path) -> Result<Self> {
        let start = start.canonicalize().context(Class::Usage, || format!("{} cannot be opened", start.display()))?;
        let folder = if start.is_dir() { start.as_path() } else { start.parent().unwrap_or(&start) };
        let repository = Repository::discover(folder).map_err(|error| no_repository(folder, &error))?;
        let root = repository.workdir().ok_or_else(|| {
            Failure::new(Class::Usage, format!("{} is a bare git repository.", folder.display()))
                .hint("Run Hone in a clone that has a working tree.")
        })?;
        Ok(Self { root: root.canonicalize().unwrap_or_else(|_| root.to_path_buf()) })
    }

    /// The repository's top folder. Paths in a goal are relative to it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the ledger lies.
    pub fn ledger_path(&self) -> PathBuf {
        self.root.join(".hone/ledger.db")
    }

    /// Makes a repository of `files` (path, text) in `root`, with one commit by Hone on `main`; gives the commit's id.
    ///
    /// # Errors
    /// `Usage` when `root` holds something already; `Infrastructure` when it cannot be written.
    pub fn create(root: &Path, files: &[(&str, &str)]) -> Result<String> {
        if fs::read_dir(root).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(Failure::new(Class::Usage, format!("{} is not empty.", root.display()))
                .hint("name a folder that does not exist yet"));
        }
        let failed = || format!("The workspace {} cannot be made", root.display());
        for (path, text) in files {
            let path = root.join(path);
            path.parent()
                .map_or(Ok(()), fs::create_dir_all)
                .and_then(|()| fs::write(&path, text))
                .context(Class::Infrastructure, failed)?;
        }
        let commit = || -> std::result::Result<String, git2::Error> {
            let mut options = git2::RepositoryInitOptions::new();
            let repository = git2::Repository::init_opts(root, options.initial_head("main"))?;
            let mut index = repository.index()?;
            index.add_all(files.iter().map(|(path, _)| path), git2::IndexAddOption::FORCE, None)?;
            index.write()?;
            let tree = repository.find_tree(index.write_tree()?)?;
            let hone = git2::Signature::now("Hone", "hone@localhost")?;
            let id = repository.commit(Some("HEAD"), &hone, &hone, "Start a workspace", &tree, &[])?;
            Ok(id.to_string())
        };
        commit().context(Class::Infrastructure, failed)
    }

    /// A repository of its own at `root` that reads this one's objects and writes none there; `head` is its HEAD, and its folder is empty.
    ///
    /// # Errors
    /// `Infrastructure` when it cannot be made.
    pub(crate) fn twin(&self, root: &Path, head: &str) -> Result<Self> {
        let failed = || "A scratch copy of the repository cannot be made".to_string();
        let objects = self.repository()?.commondir().join("objects");
        let made = || -> std::result::Result<(), git2::Error> {
            let alternates = Repository::init(root)?.path().join("objects/info/alternates");
            fs::write(&alternates, format!("{}\n", objects.display()))
                .map_err(|e| git2::Error::from_str(&e.to_string()))?;
            // Opened anew: the object store reads its alternates when it is opened.
            let repository = Repository::open(root)?;
            repository.reference("refs/heads/main", Oid::from_str(head)?, true, "hone: replay")?;
            repository.set_head("refs/heads/main")
        };
        made().context(Class::Infrastructure, failed)?;
        Self::discover(root)
    }

    /// Where a campaign's run folders lie.
    pub fn runs_path(&self, campaign: &str) -> PathBuf {
        self.root.join("runs").join(campaign)
    }

    /// Makes `.hone/` and `runs/`, each with a `.gitignore` of its own, so that no file of the person's has to change.
    ///
    /// # Errors
    /// `Infrastructure` when they cannot be written.
    pub fn prepare(&self) -> Result<()> {
        for name in [".hone", "runs"] {
            let folder = self.root.join(name);
            let ignore = folder.join(".gitignore");
            let made = fs::create_dir_all(&folder)
                .and_then(|()| if ignore.exists() { Ok(()) } else { fs::write(&ignore, "*\n") });
            made.context(Class::Infrastructure, || format!("{} cannot be written", folder.display()))?;
        }
        Ok(())
    }

    /// A folder in `.hone/` that is gone when the returned handle is. While its process lives it is locked, which tells it from one that
    /// a killed process left.
    pub(crate) fn scratch(&self) -> Result<Scratch> {
        // A new folder is not locked yet: nobody may sweep meanwhile.
        let _guard = self.lock(SWEEPING)?;
        let failed = || "A scratch folder cannot be written".to_string();
        let folder = tempfile::Builder::new()
            .prefix(SCRATCH)
            .tempdir_in(self.root.join(".hone"))
            .context(Class::Infrastructure, failed)?;
        let lock = File::open(folder.path()).context(Class::Infrastructure, failed)?;
        lock.try_lock().map_err(std::io::Error::from).context(Class::Infrastructure, failed)?;
        Ok(Scratch { folder, _lock: lock })
    }

    /// Removes what killed processes left behind: scratch folders that nobody holds, and half-written exports of `campaign`, whose lock
    /// the caller holds. What cannot be removed stays: it is in nobody's way.
    pub(crate) fn sweep(&self, campaign: &str) {
        let inside = |folder: &Path, prefix: &str| -> Vec<PathBuf> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect()
        };
        let subjects = inside(&self.runs_path(campaign), "");
        let mut left: Vec<PathBuf> = subjects.iter().flat_map(|subject| inside(subject, EXPORTING)).collect();
        let guard = self.lock(SWEEPING);
        if guard.is_ok() {
            let scratch = inside(&self.root.join(".hone"), SCRATCH).into_iter();
            left.extend(scratch.filter(|folder| File::open(folder).is_ok_and(|file| file.try_lock().is_ok())));
        }
        for folder in left {
            if let Err(error) = fs::remove_dir_all(&folder) {
                tracing::info!("{} was left by a killed process and stays: {error}", folder.display());
            }
        }
    }

    /// Takes the lock `name` in `.hone/`, or fails at once when another process holds it.
    ///
    /// # Errors
    /// `Usage` when it is held, `Infrastructure` when the file cannot be written.
    pub fn try_lock(&self, name: &str) -> Result<Lock> {
        let file = self.lock_file(name)?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(fs::TryLockError::WouldBlock) => {
                Err(Failure::new(Class::Usage, format!("Another process runs {name}."))
                    .hint("See it with `hone campaign status`; a campaign has one driver at a time."))
            }
            Err(fs::TryLockError::Error(e)) => {
                Err(Failure::new(Class::Infrastructure, format!("{name} cannot be locked: {e}.")))
            }
        }
    }

    /// Whether some process holds the lock `name`.
    ///
    /// # Errors
    /// `Infrastructure` when the file cannot be opened.
    pub fn is_locked(&self, name: &str) -> Result<bool> {
        Ok(matches!(self.lock_file(name)?.try_lock(), Err(fs::TryLockError::WouldBlock)))
    }

    /// Takes the lock `name`, waiting for its holder.
    ///
    /// # Errors
    /// `Infrastructure` when it cannot be taken.
    pub fn lock(&self, name: &str) -> Result<Lock> {
        let file = self.lock_file(name)?;
        file.lock().context(Class::Infrastructure, || format!("{name} cannot be locked"))?;
        Ok(Lock { _file: file })
    }

    fn lock_file(&self, name: &str) -> Result<File> {
        self.prepare()?;
        let path = self.root.join(".hone").join(format!("{name}.lock"));
        File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .context(Class::Infrastructure, || format!("{} cannot be opened", path.display()))
    }

    /// Opens the repository.
    pub(crate) fn repository(&self) -> Result<Repository> {
        Repository::open(&self.root)
            .context(Class::Infrastructure, || format!("The git repository {} cannot be opened", self.root.display()))
    }

    /// `path` relative to the root, with `/` between its parts.
    ///
    /// # Errors
    /// `Usage` when it lies outside.
    pub fn relative(&self, path: &Path) -> Result<String> {
        let full = path.canonicalize().context(Class::Usage, || format!("{} cannot be opened", path.display()))?;
        let inside = full.strip_prefix(&self.root).map_err(|_| {
            Failure::new(
                Class::Usage,
                format!("{} lies outside the repository {}.", path.display(), self.root.display()),
            )
        })?;
        Ok(inside.components().map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/"))
    }

    /// The id of the commit that HEAD names.
    ///
    /// # Errors
    /// `Usage` when there is no commit yet.
    pub fn head(&self) -> Result<String> {
        let repository = self.repository()?;
        let head = repository.head().and_then(|h| h.peel_to_commit()).map_err(|_| {
            Failure::new(Class::Usage, format!("The repository {} has no commit yet.", self.root.display()))
                .hint("Commit the goal, the recipe and the suites first: a campaign runs from commits.")
        })?;
        Ok(head.id().to_string())
    }

    /// Which of `paths` differ between HEAD and the working tree, untracked ones included. Neither the index nor its times are refreshed.
    ///
    /// # Errors
    /// `Infrastructure` when git cannot read the repository.
    pub fn uncommitted(&self, paths: &[String]) -> Result<Vec<String>> {
        let repository = self.repository()?;
        let mut options = git2::StatusOptions::new();
        options
            .include_untracked(true)
            .include_ignored(true)
            .no_refresh(true)
            .update_index(false)
            .disable_pathspec_match(true);
        paths.iter().for_each(|p| {
            options.pathspec(p);
        });
        let statuses =
            repository.statuses(Some(&mut options)).context(Class::Infrastructure, || "Git status failed".into())?;
        let mut found: Vec<String> = statuses
            .iter()
            .filter(|s| s.status() != git2::Status::CURRENT)
            .filter_map(|s| s.path().ok().map(str::to_owned))
            .filter(|p| paths.contains(p))
            .collect();
        found.sort();
        found.dedup();
        Ok(found)
    }

    /// Every file of a commit's tree, by path. Submodules are left out: their content is not in the repository.
    ///
    /// # Errors
    /// `Integrity` when the commit or its tree cannot be read.
    pub fn files(&self, commit: &str) -> Result<BTreeMap<String, TreeFile>> {
        files(&self.repository()?, commit)
    }

    /// The bytes of `path` at `commit`, or none where it has no such file.
    ///
    /// # Errors
    /// `Integrity` when the commit cannot be read.
    pub fn read(&self, commit: &str, path: &str) -> Result<Option<Vec<u8>>> {
        let repository = self.repository()?;
        let tree = tree_of(&repository, commit)?;
        let Ok(entry) = tree.get_path(Path::new(path)) else { return Ok(None) };
        match repository.find_blob(entry.id()) {
            Ok(blob) => Ok(Some(blob.content().to_vec())),
            Err(_) => Ok(None),
        }
    }

    /// The text of `path` at `commit`.
    ///
    /// # Errors
    /// `Usage` when there is no such file or it is not UTF-8.
    pub fn text(&self, commit: &str, path: &str) -> Result<String> {
        let bytes = self.read(commit, path)?.ok_or_else(|| {
            Failure::new(Class::Usage, format!("{path} is not in commit {}.", short(commit)))
                .hint(format!("Add and commit it: `git add {path}`."))
        })?;
        String::from_utf8(bytes).map_err(|_| Failure::new(Class::Usage, format!("{path} is not UTF-8 text.")))
    }

    /// Writes a commit's tree into `folder`, which then holds exactly that; done already when it exists. Content is written as stored,
    /// without git's filters, attributes or hooks.
    ///
    /// # Errors
    /// `Infrastructure` when files cannot be written.
    pub fn export(&self, commit: &str, folder: &Path) -> Result<()> {
        if folder.exists() {
            return Ok(());
        }
        let failed = |path: &Path| format!("{} cannot be written", path.display());
        let parent = folder.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(parent).context(Class::Infrastructure, || failed(parent))?;
        let building = tempfile::Builder::new()
            .prefix(EXPORTING)
            .tempdir_in(parent)
            .context(Class::Infrastructure, || failed(parent))?;
        let repository = self.repository()?;
        for (path, file) in files(&repository, commit)? {
            let content = repository
                .find_blob(file.blob)
                .context(Class::Integrity, || format!("{path} cannot be read from git"))?;
            let to = building.path().join(&path);
            write_file(&to, file.mode, content.content()).context(Class::Infrastructure, || failed(&to))?;
        }
        let building = building.keep();
        match fs::rename(&building, folder) {
            Ok(()) => Ok(()),
            // Another process exported the same commit first: content is the same by construction.
            Err(_) if folder.exists() => {
                fs::remove_dir_all(&building).context(Class::Infrastructure, || failed(&building))
            }
            Err(e) => Err(Failure::new(Class::Infrastructure, format!("{}: {e}.", failed(folder)))),
        }
    }

    /// What differs between `folder` and the commit's tree: changed, missing and added files, sorted. Empty when it is intact.
    ///
    /// # Errors
    /// `Infrastructure` when the folder cannot be read.
    pub fn differences(&self, commit: &str, folder: &Path) -> Result<Vec<String>> {
        let mut expected = self.files(commit)?;
        let mut different = Vec::new();
        for path in walk(folder).context(Class::Infrastructure, || format!("{} cannot be read", folder.display()))? {
            let same = match expected.remove(&path) {
                Some(file) => same_content(&folder.join(&path), file),
                None => false,
            };
            if !same {
                different.push(path);
            }
        }
        different.extend(expected.into_keys());
        different.sort();
        Ok(different)
    }

    /// The hash of everything that `editable` does not allow: sorted (path, mode, content id). A candidate has its parent's.
    ///
    /// # Errors
    /// `Integrity` when the commit cannot be read.
    pub fn protected_hash(&self, commit: &str, editable: impl Fn(&str) -> bool) -> Result<String> {
        let mut hash = Sha256::new();
        for (path, file) in self.files(commit)?.iter().filter(|(path, _)| !editable(path)) {
            hash.update(format!("{path}\0{:o}\0{}\n", file.mode, file.blob));
        }
        Ok(hex::encode(hash.finalize()))
    }
}

/// Why git opens no repository around `folder`.
fn no_repository(folder: &Path, error: &git2::Error) -> Failure {
    if error.code() == git2::ErrorCode::Owner {
        let top = folder.ancestors().find(|f| f.join(".git").exists()).unwrap_or(folder).display();
        return Failure::new(Class::Usage, format!("The git repository {top} belongs to another user."))
            .hint(format!("If you trust what is in it: `git config --global --add safe.directory {top}`."));
    }
    Failure::new(Class::Usage, format!("{} is not in a git repository.", folder.display()))
        .hint("A campaign runs from commits: `git init`, `git add` and `git commit` here, or start from `hone init`.")
}

/// The first ten digits of an id, for people.
pub fn short(id: &str) -> &str {
    id.get(..10).unwrap_or(id)
}

pub(crate) fn find_commit<'r>(repository: &'r Repository, id: &str) -> Result<git2::Commit<'r>> {
    Oid::from_str(id).and_then(|oid| repository.find_commit(oid)).map_err(|e| {
        Failure::new(Class::Integrity, format!("Commit {} is not in the repository: {}.", short(id), e.message()))
    })
}

pub(crate) fn tree_of<'r>(repository: &'r Repository, commit: &str) -> Result<git2::Tree<'r>> {
    find_commit(repository, commit)?
        .tree()
        .context(Class::Integrity, || format!("The tree of {} cannot be read", short(commit)))
}

fn files(repository: &Repository, commit: &str) -> Result<BTreeMap<String, TreeFile>> {
    let mut found = BTreeMap::new();
    let mut not_text = None;
    tree_of(repository, commit)?
        .walk(TreeWalkMode::PreOrder, |folder, entry| {
            if entry.kind() == Some(ObjectType::Blob) {
                match entry.name() {
                    Ok(name) => drop(
                        found.insert(format!("{folder}{name}"), TreeFile { mode: entry.filemode(), blob: entry.id() }),
                    ),
                    Err(_) => not_text = Some(format!("{folder}{}", String::from_utf8_lossy(entry.name_bytes()))),
                }
            }
            TreeWalkResult::Ok
        })
        .context(Class::Integrity, || format!("The tree of {} cannot be read", short(commit)))?;
    match not_text {
        None => Ok(found),
        Some(path) => {
            Err(Failure::new(Class::Usage, format!("The name of {path} is not UTF-8.")).hint("Rename the file."))
        }
    }
}

fn write_file(to: &Path, mode: i32, content: &[u8]) -> std::io::Result<()> {
    use std::os::unix::{ffi::OsStrExt, fs::PermissionsExt};
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    if mode == i32::from(FileMode::Link) {
        return std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(content), to);
    }
    fs::write(to, content)?;
    if mode == i32::from(FileMode::BlobExecutable) {
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))
    } else {
        Ok(())
    }
}

/// Every file and link under `folder`, relative, with `/` between parts; links are not followed.
fn walk(folder: &Path) -> std::io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![folder.to_path_buf()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                waiting.push(entry.path());
                continue;
            }
            let path = entry.path();
            let inside = path.strip_prefix(folder).unwrap_or(&path).components();
            found.insert(
                inside
                    .filter_map(|c| if let Component::Normal(part) = c { Some(part.to_string_lossy()) } else { None })
                    .collect::<Vec<_>>()
                    .join("/"),
            );
        }
    }
    Ok(found)
}

fn same_content(path: &Path, file: TreeFile) -> bool {
    use std::os::unix::{ffi::OsStrExt, fs::PermissionsExt};
    let Ok(meta) = path.symlink_metadata() else { return false };
    let content = if meta.is_symlink() {
        if file.mode != i32::from(FileMode::Link) {
            return false;
        }
        fs::read_link(path).map(|target| target.as_os_str().as_bytes().to_vec())
    } else {
        let executable = meta.permissions().mode() & 0o111 != 0;
        if file.mode == i32::from(FileMode::Link) || executable != (file.mode == i32::from(FileMode::BlobExecutable)) {
            return false;
        }
        fs::read(path)
    };
    content.ok().and_then(|bytes| Oid::hash_object(ObjectType::Blob, &bytes).ok()) == Some(file.blob)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_of_another_user_is_told_from_none() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join(".git")).unwrap();
        let inside = root.path().join("a/b");
        let error = |code| git2::Error::new(code, git2::ErrorClass::Repository, "no");
        let failure = no_repository(&inside, &error(git2::ErrorCode::Owner));
        assert!(failure.message.contains("another user") && failure.class == Class::Usage, "{failure}");
        let line = format!("git config --global --add safe.directory {}`", root.path().display());
        assert!(failure.hint.unwrap().contains(&line));
        let failure = no_repository(&inside, &error(git2::ErrorCode::NotFound));
        assert!(failure.message.contains("is not in a git repository"), "{failure}");
    }
}
