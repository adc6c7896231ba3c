//! What a score was measured with. Two scores are compared only where everything but the model and the seed is the same.

use crate::model::{LanguageModel, MODEL_KEYS, Sampling};
use crate::scorer::Scoring;
use crate::suite::{Subset, Suite};
use crate::task::digest;
use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The version of what is measured here. Raised with every change that may change a score: a scorer, a split, an estimate.
pub const HARNESS: &str = concat!("hone-evals ", env!("CARGO_PKG_VERSION"), " measure 1");

/// Everything that a score depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// [`HARNESS`].
    pub harness: String,
    /// Hash of the suite file's content.
    pub suite: String,
    /// Each task by name.
    pub tasks: BTreeMap<String, TaskPrint>,
    /// Which items.
    pub subset: Subset,
    /// Seed of the sampling.
    pub seed: u64,
    /// [`LanguageModel::identity`].
    pub model: Map<String, Value>,
}

/// What a task's score depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskPrint {
    /// Hash of the task, its parameters and its data.
    pub data: String,
    /// Hash of the items' ids and of the prompts as they were sent.
    pub prompts: String,
    /// The scorer.
    pub scorer: Scoring,
    /// How completions were sampled.
    pub sampling: Sampling,
}

impl Fingerprint {
    /// The fingerprint of evaluating `model` on `subset`. `prompts` gives what each task sends, in the suite's order.
    pub(crate) fn new(
        model: &dyn LanguageModel,
        suite: &Suite,
        subset: Subset,
        seed: u64,
        prompts: &[Vec<String>],
    ) -> Result<Self> {
        let mut tasks = BTreeMap::new();
        for (task, prompts) in suite.tasks().iter().zip(prompts) {
            let ids = task.items(&subset)?.iter().map(|item| item.id.as_str());
            let all: Vec<&str> = ids.chain(prompts.iter().map(String::as_str)).collect();
            let print = TaskPrint {
                data: task.data_hash(),
                prompts: digest(&all),
                scorer: task.entry().scoring().clone(),
                sampling: task.entry().sampling.clone(),
            };
            tasks.insert(task.entry().name.clone(), print);
        }
        let suite = suite.hash().to_string();
        Ok(Self { harness: HARNESS.to_string(), suite, tasks, subset, seed, model: model.identity() })
    }

    /// A hash of all of it, the order of the model's keys aside.
    pub fn hash(&self) -> String {
        digest(&["fingerprint", &sorted(&serde_json::to_value(self).expect("a fingerprint is JSON")).to_string()])
    }

    /// In what two measurements differ, the model's own keys and the seed aside: names such as `tasks.add.sampling.k`. Empty where
    /// they may be compared.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let strip = |print: &Self| {
            let mut value = serde_json::to_value(print).expect("a fingerprint is JSON");
            value["seed"] = Value::Null;
            if let Some(model) = value["model"].as_object_mut() {
                model.retain(|key, _| !MODEL_KEYS.contains(&key.as_str()));
            }
            value
        };
        let mut found = Vec::new();
        differ("", &strip(self), &strip(other), &mut found);
        // Each of the tasks' own differences is one of the suite's too: the more telling are shown.
        if found.iter().any(|name| name.starts_with("tasks.")) {
            found.retain(|name| name != "suite");
        }
        found
    }

    /// Refuses to compare what was measured differently.
    ///
    /// # Errors
    /// [`Class::Other`], naming the differences.
    pub fn comparable(&self, other: &Self) -> Result<()> {
        let differences = self.differences(other);
        if differences.is_empty() {
            return Ok(());
        }
        let message = format!("These scores were measured differently: {}.", differences.join(", "));
        Err(Failure::new(Class::Other, message).hint("measure both again with the same suite, engine and settings"))
    }
}

/// `value` with the keys of all its objects in order.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let ordered: BTreeMap<&String, Value> = map.iter().map(|(key, value)| (key, sorted(value))).collect();
            Value::Object(ordered.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        Value::Array(list) => Value::Array(list.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

/// The names of the leaves in which `a` and `b` differ.
fn differ(name: &str, a: &Value, b: &Value, found: &mut Vec<String>) {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                differ(&name, a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), found);
            }
        }
        (a, b) if a != b => found.push(name.to_string()),
        _ => {}
    }
}
