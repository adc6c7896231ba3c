//! Admission: whether a proposal becomes a candidate. All that can be known without a run is asked here, in order of cost; a refusal says
//! why and has cost nothing. Edits are applied by [`crate::edit`], commits are written by [`crate::branch`].

use crate::branch::Files;
use crate::edit::{self, Change};
use crate::history::History;
use crate::judge::Verdict;
use crate::proposal::Proposal;
use crate::record::{Admission, Admitted, Reason, RecipeFacts, Refusal};
use crate::scope::Scope;
use crate::workspace::{TreeFile, Workspace};
use hone_runs::{Class, Failure, Result, failure::Context};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Asks the trainer whether a recipe, a path in a workspace's tree, can be run, and what it will take.
pub type CheckRecipe = dyn Fn(&Path, &str) -> Result<RecipeFacts> + Send + Sync;

/// What an admission is decided on.
pub struct Admitting<'a> {
    /// The repository.
    pub workspace: &'a Workspace,
    /// The campaign so far.
    pub history: &'a History,
    /// What may be edited.
    pub scope: &'a Scope,
    /// The incumbent's commit.
    pub parent: &'a str,
    /// The trainer's word on recipes.
    pub check_recipe: &'a CheckRecipe,
}

/// Edits at most.
const MOST_EDITS: usize = 64;
/// Bytes of the changed files at most, and of a title or a hypothesis.
const MOST_BYTES: usize = 256 * 1024;
const MOST_TITLE: usize = 200;
const MOST_HYPOTHESIS: usize = 4000;

type Checked<T> = std::result::Result<T, Refusal>;

impl Admitting<'_> {
    /// Decides.
    ///
    /// # Errors
    /// When the repository or the disk cannot be used. What is wrong with the proposal itself is a refusal.
    pub fn admit(&self, proposal: &Proposal) -> Result<Admission> {
        let tree = self.workspace.files(self.parent)?;
        let files = editable_files(self.workspace, self.scope, self.parent)?;
        let checked = self.check_words(proposal).and_then(|()| self.check_paths(proposal, &tree));
        let checked = checked.and_then(|()| {
            let changed = edit::apply_edits(&files, &proposal.edits).map_err(|f| refusal(Reason::Edits, f))?;
            let changes = self.check_changes(&files, &changed, &tree)?;
            let flags = self.check_novelty(proposal, &changes)?;
            Ok((changed, changes, flags))
        });
        let (changed, changes, flags) = match checked {
            Ok(parts) => parts,
            Err(refused) => return Ok(Admission::Refused(refused)),
        };
        match self.dry_run(&changed) {
            Ok(facts) => {
                Ok(Admission::Admitted(Admitted { fingerprint: edit::fingerprint(&changes), changes, facts, flags }))
            }
            Err(failure) if matches!(failure.class, Class::Usage | Class::Candidate | Class::Agent) => {
                Ok(Admission::Refused(refusal(Reason::Recipe, failure)))
            }
            Err(failure) => Err(failure),
        }
    }

    fn check_words(&self, proposal: &Proposal) -> Checked<()> {
        let refuse =
            |reason, message: &str, hint: &str| Err(refusal(reason, Failure::new(Class::Agent, message).hint(hint)));
        if proposal.title.trim().is_empty() || proposal.hypothesis.trim().is_empty() {
            return refuse(
                Reason::Incomplete,
                "The proposal lacks a title or a hypothesis.",
                "Say what was seen and why the change should help.",
            );
        }
        if !proposal.predicted_effect.is_finite() {
            return refuse(
                Reason::Incomplete,
                "The predicted effect is not a number.",
                "Give the change of the metric that is expected.",
            );
        }
        if proposal.edits.is_empty() {
            return refuse(Reason::NoChange, "The proposal edits nothing.", "Give at least one edit.");
        }
        if proposal.title.len() > MOST_TITLE || proposal.hypothesis.len() > MOST_HYPOTHESIS {
            return refuse(
                Reason::Size,
                "The title or the hypothesis is too long.",
                "A title has 200 bytes at most, a hypothesis 4000.",
            );
        }
        let bytes = serde_json::to_string(&proposal.edits).map_or(usize::MAX, |text| text.len());
        if proposal.edits.len() > MOST_EDITS || bytes > MOST_BYTES {
            let message = format!("The proposal has {} edits of {bytes} bytes in all.", proposal.edits.len());
            return refuse(Reason::Size, &message, "64 edits and 256 KiB are the most: propose one change at a time.");
        }
        Ok(())
    }

    fn check_paths(&self, proposal: &Proposal, tree: &BTreeMap<String, TreeFile>) -> Checked<()> {
        for edit in &proposal.edits {
            let path = edit.file();
            let refuse = |why: &str| {
                let opened = self.history.started.goal.edit.join(", ");
                let message = format!("{path:?} may not be edited: {why}.");
                Err(refusal(
                    Reason::Scope,
                    Failure::new(Class::Agent, message).hint(format!("The goal opens {opened}.")),
                ))
            };
            if !crate::scope::is_plain(path) {
                return refuse("it is not a path inside the workspace");
            }
            if crate::scope::is_prompt(path) {
                return refuse("it is what proposers are told, and no pattern opens that");
            }
            if !self.scope.allows(path) {
                return refuse("the goal does not open it");
            }
            let parts = path.match_indices('/').map(|(at, _)| &path[..at]);
            if parts.chain([path]).any(|part| tree.get(part).is_some_and(|f| f.mode == 0o120_000 || part != path)) {
                return refuse("it is, or lies behind, a symbolic link or a file");
            }
            // A file system that folds case would write to the other file.
            if !tree.contains_key(path) && tree.keys().any(|known| known.eq_ignore_ascii_case(path)) {
                return refuse("a file of that name in other case exists");
            }
        }
        Ok(())
    }

    fn check_changes(
        &self,
        files: &BTreeMap<String, String>,
        changed: &Files,
        tree: &BTreeMap<String, TreeFile>,
    ) -> Checked<Vec<Change>> {
        let mut after = files.clone();
        for (path, content) in changed {
            match content {
                Some(text) => drop(after.insert(path.clone(), text.clone())),
                None => drop(after.remove(path)),
            }
        }
        let changes = edit::changes(files, &after);
        let refuse =
            |reason, message: &str, hint: &str| Err(refusal(reason, Failure::new(Class::Agent, message).hint(hint)));
        if changes.is_empty() {
            return refuse(Reason::NoChange, "Only comments or layout would differ.", "Change a value.");
        }
        if edit::seed_only(&changes) {
            return refuse(
                Reason::SeedOnly,
                "Only seeds would differ.",
                "Seeds are the harness's: a run gets its own whatever the recipe says. Change something that matters.",
            );
        }
        let recipe = &self.history.started.goal.run.recipe;
        let is_compute = |c: &&Change| {
            c.file == *recipe && c.key.as_deref().is_some_and(|key| key == "compute" || key.starts_with("compute."))
        };
        if let Some(change) = changes.iter().find(is_compute) {
            let message = format!("`{}` would change the run's compute.", change.key.as_deref().unwrap_or("compute"));
            return refuse(
                Reason::Compute,
                &message,
                "Every candidate has the baseline's counted compute: find what makes better use of it.",
            );
        }
        self.check_sources(files, &after, tree)?;
        Ok(changes)
    }

    /// Refuses a change by which training would see what judges it, or begin from compute that nobody counted: a text anywhere in the
    /// recipe that was not there before and leads to a file that the goal's suites read, out of the workspace, or through a symbolic link;
    /// another checkpoint to start from; and a suite, edited or newly named, that deals the suites' own data out anew.
    fn check_sources(
        &self,
        before: &BTreeMap<String, String>,
        after: &BTreeMap<String, String>,
        tree: &BTreeMap<String, TreeFile>,
    ) -> Checked<()> {
        let refuse =
            |message: String, hint: &str| Err(refusal(Reason::Source, Failure::new(Class::Agent, message).hint(hint)));
        let goal = &self.history.started.goal;
        let judged = |text: &str| {
            let path = normal(text);
            self.history.started.data.iter().find(|data| normal(data).eq_ignore_ascii_case(&path))
        };
        for (path, text) in after.iter().filter(|(path, text)| before.get(*path) != Some(text)) {
            if *path == goal.run.recipe || !edit::is_data(path) {
                continue;
            }
            if let Some(data) = texts(path, text)?.values().find_map(|value| judged(value)) {
                return refuse(
                    format!("{path} names {data}, which a suite of the goal reads, and was changed."),
                    "What judges may not be dealt out anew: leave files that name it as they are, or name other data.",
                );
            }
        }
        let read = |files: &BTreeMap<String, String>| {
            files.get(&goal.run.recipe).map_or(Ok(BTreeMap::new()), |text| texts(&goal.run.recipe, text))
        };
        let old = read(before)?;
        let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_string();
        let known: BTreeSet<_> = old.iter().map(|(key, text)| (last(key), text.clone())).collect();
        for (key, text) in read(after)?.into_iter().filter(|(key, text)| !known.contains(&(last(key), text.clone()))) {
            if key == "model.from" {
                return refuse(
                    format!("`{key}` would start from the checkpoint {text}, whose compute is not counted."),
                    "Every candidate starts where the incumbent starts: leave `model.from` as it is.",
                );
            }
            if let Some(data) = judged(&text) {
                return refuse(
                    format!("`{key}` names {data}, which a suite of the goal reads: its answers judge the candidate."),
                    "Train on a native task, or on the suite file itself, of which training sees the train split alone.",
                );
            }
            if text.starts_with('/') || text.split('/').any(|part| part == "..") {
                return refuse(
                    format!("`{key}` is {text:?}, which leads out of the workspace."),
                    "Name a file of the workspace, relative to its root and without `..`.",
                );
            }
            let path = normal(&text);
            let leading = path.match_indices('/').map(|(at, _)| &path[..at]).chain([path.as_str()]);
            if leading.into_iter().any(|part| tree.get(part).is_some_and(|file| file.mode == 0o120_000)) {
                return refuse(
                    format!("`{key}` is {text:?}, which is, or lies behind, a symbolic link."),
                    "Name the file itself.",
                );
            }
            let is_suite = edit::is_data(&path) && !goal.suites().contains(&path);
            if is_suite && let Some(data) = self.names_judged(&path, after, &judged)? {
                return refuse(
                    format!("`{key}` names {path}, which reads {data}, and so does a suite of the goal."),
                    "Train on the goal's own suite file, of which training sees the train split alone.",
                );
            }
        }
        Ok(())
    }

    /// The judged data that the YAML or JSON file at `path` names, as the candidate would have it.
    fn names_judged<'d>(
        &self,
        path: &str,
        after: &BTreeMap<String, String>,
        judged: &dyn Fn(&str) -> Option<&'d String>,
    ) -> Checked<Option<&'d String>> {
        let text = match after.get(path) {
            Some(text) => text.clone(),
            None => self.workspace.text(self.parent, path).unwrap_or_default(),
        };
        Ok(texts(path, &text)?.values().find_map(|value| judged(value)))
    }

    /// Refuses what was tried on the same incumbent already, unless the proposal says what is different.
    fn check_novelty(&self, proposal: &Proposal, changes: &[Change]) -> Checked<Vec<String>> {
        let print = edit::fingerprint(changes);
        let mut flags = Vec::new();
        for (number, round) in &self.history.rounds {
            if round.admitted().is_none_or(|a| a.fingerprint != print) {
                continue;
            }
            // What a limit cut short was not really tried.
            if round.ruling.as_ref().is_some_and(|r| r.verdict == Verdict::Incomplete) {
                continue;
            }
            let same_parent = round.candidate.as_ref().is_some_and(|c| c.parent == self.parent);
            if same_parent && proposal.differs.as_ref().is_none_or(|d| d.trim().is_empty()) {
                let outcome =
                    round.ruling.as_ref().map_or("no verdict".into(), |r| format!("{:?}", r.verdict).to_lowercase());
                let message = format!("Round {number} tried the same change on the same incumbent: {outcome}.");
                return Err(refusal(
                    Reason::Repeat,
                    Failure::new(Class::Agent, message)
                        .hint("Propose something else, or state in `differs` what is different now."),
                ));
            }
            flags.push(format!("repeats round {number}"));
        }
        Ok(flags)
    }

    /// Builds the candidate's tree in a scratch folder and asks the trainer.
    fn dry_run(&self, changed: &Files) -> Result<RecipeFacts> {
        let cannot = || "A scratch folder cannot be written".to_string();
        let scratch = self.workspace.scratch()?;
        let tree = scratch.path().join("tree");
        self.workspace.export(self.parent, &tree)?;
        for (path, content) in changed {
            let to = tree.join(path);
            let written = match content {
                Some(text) => {
                    std::fs::create_dir_all(to.parent().unwrap_or(&tree)).and_then(|()| std::fs::write(&to, text))
                }
                None => std::fs::remove_file(&to),
            };
            written.context(Class::Infrastructure, cannot)?;
        }
        (self.check_recipe)(&tree, &self.history.started.goal.run.recipe)
    }
}

/// A path without empty parts and `.`.
fn normal(path: &str) -> String {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/")
}

/// Every text in a YAML or JSON file, by dotted key.
fn texts(path: &str, text: &str) -> Checked<BTreeMap<String, String>> {
    let value = edit::parse(path, text).map_err(|failure| {
        refusal(Reason::Edits, Failure { message: format!("{path} cannot be parsed: {}", failure.message), ..failure })
    })?;
    let text = |(key, value)| match value {
        Value::String(text) => Some((key, text)),
        _ => None,
    };
    Ok(edit::leaves(Some(&value)).into_iter().filter_map(text).collect())
}

fn refusal(reason: Reason, failure: Failure) -> Refusal {
    let message = match &failure.at {
        Some(at) => format!("{at}: {}", failure.message),
        None => failure.message,
    };
    Refusal { reason, message, hint: failure.hint }
}

/// The text files that a candidate may edit, at `commit`. Larger ones and those that are not UTF-8 are left out.
///
/// # Errors
/// `Integrity` when the commit cannot be read.
pub fn editable_files(workspace: &Workspace, scope: &Scope, commit: &str) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for (path, file) in workspace.files(commit)? {
        if file.mode != 0o120_000 && scope.allows(&path) {
            let bytes = workspace.read(commit, &path)?.unwrap_or_default();
            if bytes.len() <= MOST_BYTES
                && let Ok(text) = String::from_utf8(bytes)
            {
                found.insert(path, text);
            }
        }
    }
    Ok(found)
}
