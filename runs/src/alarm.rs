//! An alarm: a sign in a run's metrics of what commonly goes wrong. The trainer raises them; people and proposers read them.

use serde::{Deserialize, Serialize};

/// The file's name in a run's folder: one JSON line an alarm.
pub const FILE: &str = "alarms.jsonl";

/// One alarm, raised once a stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alarm {
    /// The step at which it was raised.
    pub step: u64,
    /// Its name, e.g. `groups-equal`.
    pub name: String,
    /// The metric that shows it.
    pub metric: String,
    /// The metric's value then.
    pub value: f64,
    /// What it means and what commonly causes it.
    pub cause: String,
    /// What to change.
    pub remedy: String,
}
