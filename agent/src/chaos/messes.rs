//! Repositories as people leave them, and fifty candidates written into each at once.

use super::{Outcome, See, belongings, changed, copy};
use crate::branch::{self, Files};
use crate::workspace::Workspace;
use git2::{Commit, IndexEntry, IndexTime, Oid, Repository, Signature};
use hone_runs::failure::Context;
use hone_runs::{Class, Result};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

type Done = std::result::Result<(), Box<dyn std::error::Error>>;

/// A state that a person may leave a repository in.
type Mess = (&'static str, fn(&Repository, &Path) -> Done);

const MESSES: [Mess; 12] = [
    ("work in progress", |_, _| Ok(())),
    ("a detached HEAD", |repository, _| {
        let head = repository.head()?.peel_to_commit()?.id();
        Ok(repository.set_head_detached(head)?)
    }),
    ("a branch without a commit", |repository, _| Ok(repository.set_head("refs/heads/not-yet")?)),
    ("locks that a killed git left", |_, folder| {
        for name in ["index.lock", "HEAD.lock", "config.lock"] {
            fs::write(folder.join(".git").join(name), "")?;
        }
        Ok(())
    }),
    ("a merge with conflicts", conflicts),
    ("hooks that fail", |_, folder| {
        fs::create_dir_all(folder.join(".git/hooks"))?;
        for name in
            ["pre-commit", "commit-msg", "post-commit", "post-checkout", "reference-transaction", "post-index-change"]
        {
            let hook = folder.join(".git/hooks").join(name);
            fs::write(&hook, "#!/bin/sh\ntouch hook-ran\nexit 1\n")?;
            fs::set_permissions(&hook, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }),
    ("settings that change content and commits", |repository, folder| {
        let mut config = repository.config()?;
        for (key, value) in [
            ("core.autocrlf", "true"),
            ("core.hooksPath", "/nowhere"),
            ("commit.gpgSign", "true"),
            ("user.name", "Somebody Else"),
            ("core.excludesFile", "/nowhere"),
            ("core.sharedRepository", "group"),
        ] {
            config.set_str(key, value)?;
        }
        Ok(fs::write(folder.join(".gitattributes"), "* text eol=crlf\n*.yaml ident\n")?)
    }),
    ("packed branches of an earlier campaign", |repository, folder| {
        let head = repository.head()?.peel_to_commit()?.id();
        let (mut packed, mut loose) = ("# pack-refs with: peeled fully-peeled sorted \n".to_owned(), Vec::new());
        packed.push_str(&format!("{head} refs/heads/hone/c0/r001-old\n"));
        for reference in repository.references()?.flatten().filter(|r| r.name().is_ok_and(|name| name != "refs/stash"))
        {
            if let (Ok(name), Some(target)) = (reference.name(), reference.target()) {
                packed.push_str(&format!("{target} {name}\n"));
                loose.push(folder.join(".git").join(name));
            }
        }
        fs::write(folder.join(".git/packed-refs"), packed)?;
        Ok(loose.iter().try_for_each(fs::remove_file)?)
    }),
    ("a linked worktree", |repository, folder| {
        repository.worktree("other", &folder.with_extension("worktree"), None)?;
        Ok(())
    }),
    ("a submodule", |repository, folder| {
        fs::create_dir_all(folder.join("vendored"))?;
        fs::write(folder.join(".gitmodules"), "[submodule \"vendored\"]\n\tpath = vendored\n\turl = ./nowhere\n")?;
        let mut index = repository.index()?;
        let id = repository.head()?.peel_to_commit()?.id();
        index.add(&entry("vendored", id, 0o160_000))?;
        Ok(index.write()?)
    }),
    ("odd names and links", |_, folder| {
        for name in ["two words.txt", "new\nline", "-rf", "ünïcode-🦀", "quote\"'`$(x)", "back\\slash", "HEAD"] {
            fs::write(folder.join(name), name)?;
        }
        symlink("/nowhere/at/all", folder.join("dangling"))?;
        symlink("loop", folder.join("loop"))?;
        symlink("..", folder.join("above"))?;
        Ok(())
    }),
    ("a bisection, a rebase and a pick under way", |repository, folder| {
        let head = repository.head()?.peel_to_commit()?.id();
        let git = folder.join(".git");
        fs::create_dir_all(git.join("rebase-merge"))?;
        for (name, text) in [
            ("BISECT_LOG", "git bisect start\n".to_owned()),
            ("BISECT_START", "master\n".to_owned()),
            ("CHERRY_PICK_HEAD", format!("{head}\n")),
            ("rebase-merge/head-name", "refs/heads/topic\n".to_owned()),
            ("rebase-merge/onto", format!("{head}\n")),
        ] {
            fs::write(git.join(name), text)?;
        }
        Ok(())
    }),
];

/// Candidates written at once.
const CANDIDATES: usize = 50;

/// Leaves the repository in `folder` as a person at work does: an untracked file, a staged one, one staged and changed again, and a stash.
pub(super) fn work_in_progress(folder: &Path) -> Result<()> {
    let leave = || -> Done {
        let mut repository = Repository::open(folder)?;
        let write = |name: &str, text: &str| fs::write(folder.join(name), text);
        let stage = |repository: &Repository, name: &str| -> Done {
            let mut index = repository.index()?;
            index.add_path(Path::new(name))?;
            Ok(index.write()?)
        };
        write("set-aside.md", "an idea for later\n")?;
        stage(&repository, "set-aside.md")?;
        repository.stash_save(&me()?, "an idea", None)?;
        write("staged.md", "staged\n")?;
        stage(&repository, "staged.md")?;
        write("both.md", "staged\n")?;
        stage(&repository, "both.md")?;
        write("both.md", "staged, and changed again\n")?;
        Ok(write("untracked.md", "nobody else's\n")?)
    };
    made(leave(), "work in progress")
}

/// Writes candidates from threads at once, over each mess: their ids are those of every other repository, each branch names its own, the
/// tree that a run would get is whole, and nothing else changes.
pub(super) fn fifty_at_once(folder: &Path, outcome: &mut Outcome, see: See) -> Result<()> {
    let mut expected: Option<Vec<String>> = None;
    for (at, (name, mess)) in MESSES.iter().enumerate() {
        see(name);
        let place = copy(folder, &format!("git-{at}"))?;
        let workspace = Workspace::discover(&place)?;
        let base = workspace.head()?;
        workspace.prepare()?;
        let repository = workspace.repository()?;
        made(mess(&repository, &place), name)?;
        let before = belongings(&place)?;
        let written: Vec<Result<String>> = std::thread::scope(|scope| {
            let candidates: Vec<_> = (0..CANDIDATES)
                .map(|i| {
                    scope.spawn({
                        let (workspace, base) = (&workspace, &base);
                        move || candidate(workspace, base, i)
                    })
                })
                .collect();
            candidates
                .into_iter()
                .map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        outcome.campaigns += 1;
        outcome.faults += CANDIDATES as u32;
        let (ids, failures): (Vec<_>, Vec<_>) = written.into_iter().partition(Result::is_ok);
        let mut differences: Vec<String> =
            failures.into_iter().filter_map(Result::err).map(|f| f.to_string()).collect();
        let ids: Vec<String> = ids.into_iter().flatten().collect();
        if ids.iter().collect::<BTreeSet<_>>().len() != ids.len() {
            differences.push("two candidates have one id".into());
        }
        if *expected.get_or_insert_with(|| ids.clone()) != ids {
            differences.push("candidates have other ids than elsewhere".into());
        }
        differences.extend(changed(&before, &belongings(&place)?));
        outcome.differences.extend(differences.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    Ok(())
}

/// Writes, publishes and exports a candidate; gives its id.
fn candidate(workspace: &Workspace, base: &str, number: usize) -> Result<String> {
    let text = format!("line one\r\n$Id$\n{number}\n");
    let files = Files::from([("recipe/notes.md".to_owned(), Some(text.clone()))]);
    let name = format!("hone/c1/r{number:03}-notes");
    let written = branch::write(workspace, base, &files, "Take notes", &name)?;
    branch::publish(workspace, &name, &written.commit)?;
    let folder = workspace.runs_path("c1").join(written.name());
    workspace.export(&written.commit, &folder)?;
    let differences = workspace.differences(&written.commit, &folder)?;
    let exported = fs::read_to_string(folder.join("recipe/notes.md")).unwrap_or_default();
    if branch::tip(workspace, &name)?.as_ref() != Some(&written.commit) || !differences.is_empty() || exported != text {
        return Err(hone_runs::Failure::new(
            Class::Integrity,
            format!("{name} is not what was written: {differences:?}"),
        ));
    }
    Ok(written.commit)
}

/// Two branches that change one line, merged into a conflict that nobody has resolved.
fn conflicts(repository: &Repository, folder: &Path) -> Done {
    let base = repository.head()?.peel_to_commit()?;
    let ours = with_file(repository, &base, "shared.md", "ours\n")?;
    let theirs = with_file(repository, &base, "shared.md", "theirs\n")?;
    let mut index = repository.merge_commits(&ours, &theirs, None)?;
    let conflicting: Vec<_> =
        index.conflicts()?.flatten().flat_map(|c| [c.ancestor, c.our, c.their]).flatten().collect();
    index.clear()?;
    let mut index = repository.index()?;
    for entry in conflicting {
        index.add(&entry)?;
    }
    index.write()?;
    fs::write(folder.join("shared.md"), "<<<<<<< ours\nours\n=======\ntheirs\n>>>>>>> theirs\n")?;
    fs::write(folder.join(".git/MERGE_HEAD"), format!("{}\n", theirs.id()))?;
    Ok(fs::write(folder.join(".git/MERGE_MSG"), "Merge theirs\n")?)
}

fn with_file<'r>(
    repository: &'r Repository,
    parent: &Commit<'r>,
    name: &str,
    text: &str,
) -> std::result::Result<Commit<'r>, git2::Error> {
    let blob = repository.blob(text.as_bytes())?;
    let mut tree = repository.treebuilder(Some(&parent.tree()?))?;
    tree.insert(name, blob, 0o100_644)?;
    let tree = repository.find_tree(tree.write()?)?;
    let me = me()?;
    repository.find_commit(repository.commit(None, &me, &me, "Change a line", &tree, &[parent])?)
}

fn entry(path: &str, id: Oid, mode: u32) -> IndexEntry {
    let epoch = IndexTime::new(0, 0);
    IndexEntry {
        ctime: epoch,
        mtime: epoch,
        dev: 0,
        ino: 0,
        mode,
        uid: 0,
        gid: 0,
        file_size: 0,
        id,
        flags: 0,
        flags_extended: 0,
        path: path.into(),
    }
}

fn me() -> std::result::Result<Signature<'static>, git2::Error> {
    Signature::now("Me", "me@localhost")
}

fn made(done: Done, name: &str) -> Result<()> {
    done.map_err(|error| std::io::Error::other(error.to_string()))
        .context(Class::Infrastructure, || format!("The trial `{name}` cannot be set up"))
}
