//! A person's repository in a temporary folder.

use hone_agent::workspace::Workspace;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A repository with one commit, made by "a person", with work in progress that must survive.
pub struct Place {
    folder: tempfile::TempDir,
}

pub const GOAL: &str =
    "goal: raise the score\nmetric: {suite: evals/add.yaml, name: add/pass@1, min_effect: 0.03}\nedit: [recipe/**]\n";
pub const RECIPE: &str = "# the knob that matters\nlr: 0.1\nstages:\n  - sft: {steps: 10}\n";

impl Place {
    pub fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let place = Self { folder };
        let repository = git2::Repository::init(place.root()).unwrap();
        for (path, text) in files {
            place.write(path, text);
        }
        let mut index = repository.index().unwrap();
        index.add_all(["*"], git2::IndexAddOption::DEFAULT, None).unwrap();
        index.write().unwrap();
        let tree = repository.find_tree(index.write_tree().unwrap()).unwrap();
        let person = git2::Signature::new("Person", "person@example.org", &git2::Time::new(1_700_000_000, 60)).unwrap();
        repository.commit(Some("HEAD"), &person, &person, "Begin", &tree, &[]).unwrap();
        place
    }

    pub fn usual() -> Self {
        Self::new(&[
            ("goal.yaml", GOAL),
            ("recipe/recipe.yaml", RECIPE),
            ("evals/add.yaml", "tasks: []\n"),
            ("README.md", "Hello\n"),
        ])
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    pub fn write(&self, path: &str, text: &str) {
        let to = self.root().join(path);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(to, text).unwrap();
    }

    pub fn workspace(&self) -> Workspace {
        Workspace::discover(self.root()).unwrap()
    }

    /// Everything that is the person's: all files but Hone's own two folders and git's object store and Hone's refs, by path.
    pub fn belongings(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut waiting = vec![self.root().to_path_buf()];
        while let Some(folder) = waiting.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let inside = path.strip_prefix(self.root()).unwrap().to_path_buf();
                let ours = [".hone", "runs", ".git/objects", ".git/refs/heads/hone", ".git/logs/refs/heads/hone"];
                if ours.iter().any(|p| inside == Path::new(p)) {
                    continue;
                }
                if path.is_dir() {
                    waiting.push(path);
                } else {
                    found.insert(inside, fs::read(&path).unwrap());
                }
            }
        }
        found
    }
}
