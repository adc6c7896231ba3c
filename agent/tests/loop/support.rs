//! A person's repository in a temporary folder, and campaigns on it with a trainer that takes milliseconds.

use crate::fake::Fake;
use hone_agent::campaign::{Campaign, EffectHook, End, Options, Toolbox};
use hone_agent::edit::Edit;
use hone_agent::history::History;
use hone_agent::progress::Observer;
use hone_agent::proposal::{Observation, Proposal, Proposed, Proposer, Proposing, Usage};
use hone_agent::record::RecipeFacts;
use hone_agent::workspace::Workspace;
use hone_runs::ledger::{FaultHook, Ledger};
use hone_runs::{Class, Failure, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A repository with one commit, made by "a person", with work in progress that must survive.
pub struct Place {
    folder: tempfile::TempDir,
}

pub const GOAL: &str = "goal: raise the score\nmetric: {suite: evals/add.yaml, name: add/pass@1, min_effect: 0.03}\nedit: [recipe/**]\n\
    runs: {replicates: 2..4, parallel: 2}\nbudget: {rounds: 3}\nreview: {keep: policy, when: better}\n";
pub const RECIPE: &str =
    "# the knob that matters\nlr: 0.1\nmode: plain\nstages:\n  - sft: {steps: 10}\n# another\n#\n#\n#\ndepth: 0\n";
const SUITE: &str = "tasks:\n  - name: add\n    data: {native: addition, digits: 2, n: 100}\n    scorer: exact\n";

impl Place {
    pub fn new(files: &[(&str, &str)]) -> Self {
        // Memory, where there is any: what is tested is order, not the disk.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let place = Self { folder };
        git2::Repository::init(place.root()).unwrap();
        for (path, text) in files {
            place.write(path, text);
        }
        place.commit("Begin");
        place
    }

    pub fn usual() -> Self {
        Self::with_goal(GOAL)
    }

    pub fn with_goal(goal: &str) -> Self {
        let files =
            [("goal.yaml", goal), ("recipe/recipe.yaml", RECIPE), ("evals/add.yaml", SUITE), ("README.md", "Hello\n")];
        Self::new(&files)
    }

    pub fn commit(&self, message: &str) -> String {
        let repository = git2::Repository::open(self.root()).unwrap();
        let mut index = repository.index().unwrap();
        index.add_all(["*"], git2::IndexAddOption::DEFAULT, None).unwrap();
        index.write().unwrap();
        let tree = repository.find_tree(index.write_tree().unwrap()).unwrap();
        let person = git2::Signature::new("Person", "person@example.org", &git2::Time::new(1_700_000_000, 60)).unwrap();
        let parent = repository.head().ok().and_then(|h| h.peel_to_commit().ok());
        let parents: Vec<_> = parent.iter().collect();
        repository.commit(Some("HEAD"), &person, &person, message, &tree, &parents).unwrap().to_string()
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

    /// Hone's branches: name to commit.
    pub fn branches(&self) -> BTreeMap<String, String> {
        let repository = git2::Repository::open(self.root()).unwrap();
        let all = repository.references_glob("refs/heads/hone/*").unwrap();
        all.map(|r| r.unwrap()).map(|r| (r.name().unwrap().to_string(), r.target().unwrap().to_string())).collect()
    }

    pub async fn ledger(&self) -> Ledger {
        Ledger::open(&self.workspace().ledger_path()).await.unwrap()
    }

    pub async fn history(&self) -> History {
        History::load(&self.ledger().await, "c1").await.unwrap()
    }
}

/// What a test gives a campaign.
#[derive(Clone, Default)]
pub struct Setting {
    pub fake: Arc<Fake>,
    pub ledger_fault: Option<FaultHook>,
    pub effect_fault: Option<EffectHook>,
    pub options: Options,
    pub observer: Option<Arc<dyn Observer>>,
}

impl Setting {
    pub fn toolbox(&self) -> Toolbox {
        Toolbox {
            exe: vec!["fake".into()],
            threads: 1,
            gpus: 0,
            device: None,
            recipe_schema: Value::Null,
            check_recipe: Box::new(check_recipe),
            launcher: self.fake.clone(),
            slots: 2,
            fault: self.effect_fault.clone(),
        }
    }

    /// Starts c1, or takes it up where it is.
    pub async fn campaign(&self, place: &Place) -> Result<Arc<Campaign>> {
        let mut ledger = place.ledger().await;
        if let Some(hook) = &self.ledger_fault {
            ledger = ledger.with_fault_hook(hook.clone());
        }
        let observer = self.observer.clone().unwrap_or_else(|| Arc::new(()));
        if ledger.campaigns().await?.is_empty() {
            Campaign::start(&place.root().join("goal.yaml"), &self.options, ledger, self.toolbox(), observer).await
        } else {
            Campaign::open(place.workspace(), "c1", ledger, self.toolbox(), observer).await
        }
    }

    pub async fn drive(&self, place: &Place, script: &Script) -> Result<End> {
        let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(script.clone())];
        self.campaign(place).await?.run(&proposers).await
    }
}

fn check_recipe(tree: &Path, recipe: &str) -> Result<RecipeFacts> {
    let text =
        fs::read_to_string(tree.join(recipe)).map_err(|e| Failure::new(Class::Usage, format!("{recipe}: {e}.")))?;
    let recipe: Value = serde_saphyr::from_str(&text).map_err(|e| Failure::new(Class::Usage, format!("{e}.")))?;
    match recipe["lr"].as_f64() {
        Some(lr) if lr < 100.0 => Ok(RecipeFacts { flops: Some(1e6), tokens: Some(1000), params: Some(10) }),
        _ => Err(Failure::new(Class::Usage, "`lr` must be a number below 100.").at("recipe/recipe.yaml:2:1")),
    }
}

type Answer = dyn Fn(&Observation) -> Result<Proposed> + Send + Sync;

/// A proposer that says what a test tells it, round by round.
#[derive(Clone)]
pub struct Script(pub Arc<Answer>);

impl Script {
    /// Sets `key` of the recipe to the round's value; the last is repeated.
    pub fn sets(edits: &[(&str, Value)]) -> Self {
        let edits: Vec<(String, Value)> = edits.iter().map(|(k, v)| ((*k).to_string(), v.clone())).collect();
        Self::of(move |seen| {
            let (key, value) = edits[(seen.round as usize - 1).min(edits.len() - 1)].clone();
            Ok(set(&key, value))
        })
    }

    pub fn of(answer: impl Fn(&Observation) -> std::result::Result<Proposal, Failure> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move |seen| {
            Ok(Proposed {
                answer: answer(seen),
                transcript: Vec::new(),
                usage: Usage { calls: 1, prompt_tokens: 7, completion_tokens: 3, usd: None },
            })
        }))
    }
}

impl Proposer for Script {
    fn name(&self) -> &str {
        "script"
    }
    fn propose<'a>(&'a self, observation: &'a Observation) -> Proposing<'a> {
        Box::pin(async move { (self.0)(observation) })
    }
}

pub fn set(key: &str, value: Value) -> Proposal {
    proposal(
        &format!("Set {key} to {value}"),
        vec![Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value }],
    )
}

pub fn proposal(title: &str, edits: Vec<Edit>) -> Proposal {
    Proposal {
        title: title.into(),
        hypothesis: "It was too low.".into(),
        edits,
        predicted_effect: 0.1,
        differs: None,
        source: "script".into(),
    }
}

/// A script that does something else before it answers in one round.
pub struct Acting<F> {
    pub script: Script,
    pub round: u32,
    pub action: F,
}

impl<F, A> Proposer for Acting<F>
where
    F: Fn() -> A + Send + Sync,
    A: Future<Output = ()> + Send,
{
    fn name(&self) -> &str {
        "acting"
    }
    fn propose<'a>(&'a self, observation: &'a Observation) -> Proposing<'a> {
        Box::pin(async move {
            if observation.round == self.round {
                (self.action)().await;
            }
            (self.script.0)(observation)
        })
    }
}

/// Better, then no better: one change is kept, one is not.
pub fn usual_script() -> Script {
    Script::sets(&[("lr", json!(0.3)), ("lr", json!(0.05)), ("lr", json!(0.4))])
}
