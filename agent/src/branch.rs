//! Candidates as git objects and branches. A candidate's commit is a function of its parent, its files and its message, so its id is known
//! before anything points at it and a repeat after a crash makes the same one. Only objects and refs under `hone/` are ever written:
//! HEAD, index, stash, working files and configuration are the person's.

use crate::workspace::{Workspace, find_commit, short, tree_of};
use git2::{DiffFormat, DiffOptions, FileMode, Oid, Repository, Signature, Time, build::TreeUpdateBuilder};
use hone_runs::{Class, Failure, Result, failure::Context};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Files that differ from a commit's: path to new content, none for a deleted one. What [`crate::edit::apply_edits`] gives.
pub type Files = BTreeMap<String, Option<String>>;

/// A commit to be judged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its id, hex.
    pub commit: String,
    /// The id of its tree.
    pub tree: String,
    /// The incumbent that it was made from.
    pub parent: String,
    /// Its branch without `refs/heads/`, e.g. `hone/c1/r017-raise-lr`.
    pub branch: String,
}

impl Candidate {
    /// The last part of the branch, which is also the name of its run folder: `r017-raise-lr`.
    pub fn name(&self) -> &str {
        self.branch.rsplit('/').next().unwrap_or(&self.branch)
    }
}

/// `r017-raise-lr`: the round, and a slug of the title.
pub fn branch_name(round: u32, title: &str) -> String {
    let mut slug = String::new();
    for c in title.chars() {
        match c.to_ascii_lowercase() {
            c @ ('a'..='z' | '0'..='9') => slug.push(c),
            _ if slug.is_empty() || slug.ends_with('-') => {}
            _ => slug.push('-'),
        }
        if slug.len() >= 40 {
            break;
        }
    }
    let slug = slug.trim_end_matches('-');
    if slug.is_empty() { format!("r{round:03}") } else { format!("r{round:03}-{slug}") }
}

/// Writes the objects of `parent` with `files` changed, and names the candidate. No ref points at it yet.
///
/// # Errors
/// `Agent` when nothing would change, `Integrity` or `Infrastructure` when git cannot read or write.
pub fn write(workspace: &Workspace, parent: &str, files: &Files, message: &str, branch: &str) -> Result<Candidate> {
    let repository = workspace.repository()?;
    let base = tree_of(&repository, parent)?;
    let tree = updated(&repository, &base, files)?;
    if tree == base.id() {
        return Err(Failure::new(Class::Agent, "The edits change nothing.")
            .hint("Propose a change that differs from the incumbent."));
    }
    let commit = commit(&repository, parent, tree, message)?;
    Ok(Candidate { commit: commit.to_string(), tree: tree.to_string(), parent: parent.into(), branch: branch.into() })
}

/// Points the candidate's branch at it. Done already when the branch names that commit.
///
/// # Errors
/// `Integrity` when the branch names another commit: it is left as it is.
pub fn publish(workspace: &Workspace, branch: &str, commit: &str) -> Result<()> {
    let repository = workspace.repository()?;
    let (name, id) = (format!("refs/heads/{branch}"), find_commit(&repository, commit)?.id());
    match at(&repository, &name)? {
        Some(found) if found == id => Ok(()),
        Some(found) => Err(occupied(branch, &found.to_string(), commit)),
        None => match locking(&repository, &name, || repository.reference(&name, id, false, "hone: candidate")) {
            Ok(()) => Ok(()),
            // Made between the look and the write: by the same rule it is either this commit or an error.
            Err(e) => match at(&repository, &name)? {
                Some(found) if found == id => Ok(()),
                Some(found) => Err(occupied(branch, &found.to_string(), commit)),
                None => Err(cannot_write(&name, &e)),
            },
        },
    }
}

/// Moves a branch from one of `known` (or from nothing) to `to`. Done already when it is there.
///
/// # Errors
/// `Integrity` when the branch names a commit that is none of `known`: somebody else moved it, and it is left as it is.
pub fn advance(workspace: &Workspace, branch: &str, known: &[String], to: &str) -> Result<()> {
    let repository = workspace.repository()?;
    let (name, id) = (format!("refs/heads/{branch}"), find_commit(&repository, to)?.id());
    let written = match at(&repository, &name)? {
        Some(found) if found == id => return Ok(()),
        Some(found) if known.iter().any(|k| *k == found.to_string()) => {
            locking(&repository, &name, || repository.reference_matching(&name, id, true, found, "hone: kept"))
        }
        Some(found) => return Err(occupied(branch, &found.to_string(), to)),
        None => locking(&repository, &name, || repository.reference(&name, id, false, "hone: kept")),
    };
    written.map_err(|e| cannot_write(&name, &e))
}

/// Writes a ref of ours. A process killed in the middle leaves git's lock on it behind. Hone writes each of its refs under a lock of its
/// own, so whoever else may hold git's is a passing command of the person's: it is given a second, then the lock is known to be dead.
fn locking<'r>(
    repository: &'r Repository,
    name: &str,
    write: impl Fn() -> std::result::Result<git2::Reference<'r>, git2::Error>,
) -> std::result::Result<(), git2::Error> {
    let is_locked = |written: &std::result::Result<_, git2::Error>| {
        written.as_ref().is_err_and(|error| error.code() == git2::ErrorCode::Locked)
    };
    let mut written = write();
    for _ in 0..20 {
        if !is_locked(&written) {
            return written.map(drop);
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        written = write();
    }
    let lock = repository.commondir().join(format!("{name}.lock"));
    if is_locked(&written) && std::fs::remove_file(&lock).is_ok() {
        tracing::warn!("{} was left by a killed process and is removed", lock.display());
        written = write();
    }
    written.map(drop)
}

/// The commit that a branch names.
///
/// # Errors
/// `Infrastructure` when the repository cannot be read.
pub fn tip(workspace: &Workspace, branch: &str) -> Result<Option<String>> {
    Ok(at(&workspace.repository()?, &format!("refs/heads/{branch}"))?.map(|id| id.to_string()))
}

/// The branches of a campaign, by their names below `hone/<campaign>/`, in their order.
///
/// # Errors
/// `Infrastructure` when the repository cannot be read.
pub fn of_campaign(workspace: &Workspace, campaign: &str) -> Result<Vec<String>> {
    let prefix = format!("refs/heads/hone/{campaign}/");
    let repository = workspace.repository()?;
    let cannot = |e: git2::Error| {
        Failure::new(Class::Infrastructure, format!("Cannot list the branches of {campaign}: {}.", e.message()))
    };
    let mut names = Vec::new();
    for reference in repository.references_glob(&format!("{prefix}*")).map_err(cannot)? {
        let reference = reference.map_err(cannot)?;
        names.extend(String::from_utf8_lossy(reference.name_bytes()).strip_prefix(&prefix).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// The difference between two commits' trees as a patch, added and removed files included; binary files are named only.
///
/// # Errors
/// `Integrity` when a commit cannot be read.
pub fn diff(workspace: &Workspace, from: &str, to: &str) -> Result<String> {
    let repository = workspace.repository()?;
    let (old, new) = (tree_of(&repository, from)?, tree_of(&repository, to)?);
    let mut options = DiffOptions::new();
    options.id_abbrev(10);
    let mut text = Vec::new();
    repository
        .diff_tree_to_tree(Some(&old), Some(&new), Some(&mut options))
        .and_then(|diff| {
            diff.print(DiffFormat::Patch, |_, _, line| {
                if matches!(line.origin(), '+' | '-' | ' ') {
                    text.push(line.origin() as u8);
                }
                text.extend_from_slice(line.content());
                true
            })
        })
        .context(Class::Integrity, || format!("{} and {} cannot be compared", short(from), short(to)))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A commit on top of `head` that takes the change `from`..`to` out again and leaves all that came later: a true revert. Where `head` is
/// `to` itself, that is `from`, and no commit is made.
///
/// # Errors
/// `Usage` when later changes touch the same lines.
pub fn revert(workspace: &Workspace, head: &str, from: &str, to: &str, message: &str) -> Result<String> {
    if head == to {
        return Ok(from.into());
    }
    let repository = workspace.repository()?;
    let (ours, ancestor, theirs) =
        (tree_of(&repository, head)?, tree_of(&repository, to)?, tree_of(&repository, from)?);
    let failed = || format!("{} cannot be taken out of {}", short(to), short(head));
    let mut merged = repository.merge_trees(&ancestor, &ours, &theirs, None).context(Class::Infrastructure, failed)?;
    if merged.has_conflicts() {
        return Err(Failure::new(Class::Usage, format!("{}: later kept changes touch the same lines.", failed()))
            .hint("Roll the later ones back first, newest first."));
    }
    let tree = merged.write_tree_to(&repository).context(Class::Infrastructure, failed)?;
    Ok(commit(&repository, head, tree, message)?.to_string())
}

fn updated(repository: &Repository, base: &git2::Tree<'_>, files: &Files) -> Result<Oid> {
    let mut builder = TreeUpdateBuilder::new();
    for (path, content) in files {
        let existing = base.get_path(std::path::Path::new(path)).ok();
        match content {
            Some(text) => {
                let blob = repository
                    .blob(text.as_bytes())
                    .context(Class::Infrastructure, || format!("{path} cannot be written to git"))?;
                let executable = existing.is_some_and(|e| e.filemode() == i32::from(FileMode::BlobExecutable));
                builder.upsert(path.as_str(), blob, if executable { FileMode::BlobExecutable } else { FileMode::Blob });
            }
            None if existing.is_some() => {
                builder.remove(path.as_str());
            }
            None => {}
        }
    }
    // A file in the place of a folder, or the other way round, is refused by git here.
    builder.create_updated(repository, base).map_err(|e| {
        Failure::new(Class::Agent, format!("The edited tree cannot be written: {}.", e.message()))
            .hint("A file cannot stand where a folder is.")
    })
}

fn commit(repository: &Repository, parent: &str, tree: Oid, message: &str) -> Result<Oid> {
    let failed = || format!("A commit on {} cannot be written", short(parent));
    let parent = find_commit(repository, parent)?;
    let when = Time::new(parent.time().seconds() + 1, 0);
    let author = Signature::new("Hone", "hone@localhost", &when).context(Class::Other, failed)?;
    let tree = repository.find_tree(tree).context(Class::Integrity, failed)?;
    repository.commit(None, &author, &author, message, &tree, &[&parent]).context(Class::Infrastructure, failed)
}

fn at(repository: &Repository, name: &str) -> Result<Option<Oid>> {
    match repository.refname_to_id(name) {
        Ok(id) => Ok(Some(id)),
        Err(e) if e.code() == git2::ErrorCode::NotFound => Ok(None),
        Err(e) => Err(Failure::new(Class::Infrastructure, format!("{name} cannot be read: {}.", e.message()))),
    }
}

fn occupied(branch: &str, found: &str, wanted: &str) -> Failure {
    Failure::new(Class::Integrity, format!("The branch {branch} names {}, not {}.", short(found), short(wanted)))
        .hint(format!("Something else moved it. Rename it (`git branch -m {branch} saved`) and resume."))
}

fn cannot_write(name: &str, error: &git2::Error) -> Failure {
    Failure::new(Class::Infrastructure, format!("{name} cannot be written: {}.", error.message()))
        .hint("Free the space, or remove the branch that stands in its way, and resume.")
}
