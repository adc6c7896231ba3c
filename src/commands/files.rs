//! `hone validate` and `hone schema`: the files that people write, checked and described.

use super::{relative, root_of};
use crate::{cli::FileKind, output, reference};
use hone_agent::goal::Goal;
use hone_evals::suite::{Suite, SuiteFile};
use hone_runs::{Class, Failure, Result, config, failure::Context};
use hone_trainer::recipe::{self, Recipe};
use serde_json::{Value, json};
use std::path::Path;

/// Checks a file of any of the three kinds, told apart by its keys, and all that it names.
pub fn validate(file: &Path, json: bool) -> Result<()> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).context(Class::Usage, || format!("Cannot read {name}"))?;
    let kind = kind_of(&text, &name)?;
    let root = root_of(file, None)?;
    let mut warnings = Vec::new();
    match kind {
        FileKind::Goal => {
            let goal = Goal::parse(&text, &name)?;
            for path in goal.suites() {
                let suite = Suite::load(&root, &path)?;
                check_names(&goal, &suite, &path).map_err(|failure| failure.at(&name))?;
                if path == goal.metric.suite {
                    warnings.extend(undetectable(&goal, &suite)?);
                }
            }
            check_recipe(&root.join(&goal.run.recipe), &root)?;
        }
        FileKind::Recipe => check_recipe(file, &root)?,
        FileKind::Suite => {
            Suite::load(&root, &relative(file, &root)?)?;
        }
    }
    let kind = label(kind);
    if !json {
        warnings.iter().for_each(|warning| output::say(&format!("warning: {warning}")));
    }
    let found = json!({"file": name, "kind": kind, "valid": true, "warnings": warnings});
    output::either(json, &found, || format!("{name}: a valid {kind}."))
}

/// Refuses a goal whose metric or floors the suite at `path` does not have.
fn check_names(goal: &Goal, suite: &Suite, path: &str) -> Result<()> {
    let metric = (goal.metric.suite == path).then_some(&goal.metric.name);
    let floors = goal.floors.iter().filter(|floor| floor.suite == path).map(|floor| &floor.name);
    metric.into_iter().chain(floors).try_for_each(|name| suite.task_of(name).map(|_| ()))
}

/// A warning where the suite has clearly too few items to show the effect that the goal asks for: by a fifth, since the estimate supposes a
/// score near one half and a campaign measures the real noise.
fn undetectable(goal: &Goal, suite: &Suite) -> Result<Option<String>> {
    let (asked, most) = (goal.metric.min_effect, goal.runs.replicates.most);
    let smallest = goal.detectable(suite)?.filter(|smallest| *smallest > 1.2 * asked);
    Ok(smallest.map(|smallest| {
        format!(
            "{} has few items for `min_effect: {asked}`: at a score near one half, a confirmation on one of {} parts of the held-out \
             items with {most} seeds shows gains from about {smallest:.3}. Smaller ones will mostly end undecided: raise `n` or the \
             share of `held_out` in the suite, or `runs.replicates` or `min_effect` in the goal.",
            suite.file(),
            goal.metric.folds
        )
    }))
}

/// Reads a recipe and checks it against itself and against the files that it names.
fn check_recipe(file: &Path, root: &Path) -> Result<()> {
    let recipe = Recipe::read(file, &[])?;
    recipe::estimate(&recipe, root).map(|_| ()).map_err(|failure| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        config::locate(failure, &text, &file.display().to_string())
    })
}

fn label(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Goal => "goal",
        FileKind::Recipe => "recipe",
        FileKind::Suite => "suite",
    }
}

/// A goal has `metric`, a suite `tasks`, a recipe what is left: told by the top-level keys, so that a slip in one of them still lands
/// with the right schema.
pub(super) fn kind_of(text: &str, name: &str) -> Result<FileKind> {
    let keys: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with([' ', '#', '-', '\t']))
        .filter_map(|line| line.split_once(':').map(|(key, _)| key.trim()))
        .collect();
    let near = |names: &[&str]| keys.iter().filter(|key| config::nearest(key, names.iter().copied()).is_some()).count();
    let goal = near(&["goal", "metric", "floors", "edit", "run", "runs", "budget", "proposer", "gate", "review"]);
    let recipe = near(&["model", "tokenizer", "compute", "optimizer", "checkpoints", "stages"]);
    let suite = near(&["tasks"]);
    if goal == 0 && recipe == 0 && suite == 0 {
        return Err(Failure::new(Class::Usage, "Not a goal, recipe or suite.")
            .hint("a goal has `goal:` and `metric:`, a recipe `model:` and `stages:`, a suite `tasks:`")
            .at(name));
    }
    Ok(if goal > recipe && goal > suite {
        FileKind::Goal
    } else if recipe >= suite {
        FileKind::Recipe
    } else {
        FileKind::Suite
    })
}

/// The JSON Schema of a kind of file.
fn schema_of(kind: FileKind) -> Value {
    match kind {
        FileKind::Goal => Goal::schema(),
        FileKind::Recipe => recipe::schema(),
        FileKind::Suite => config::schema::<SuiteFile>(),
    }
}

/// Prints a schema, or the reference page made of it.
pub fn schema(kind: FileKind, markdown: bool) -> Result<()> {
    let schema = schema_of(kind);
    if markdown {
        output::text(&reference::markdown(&format!("{}.yaml", label(kind)), &schema));
        Ok(())
    } else {
        output::json(&schema)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_names_metrics_that_its_suites_have() {
        let text = "tasks:\n- name: add\n  data: {native: addition, n: 40}\n";
        let suite = Suite::parse(Path::new("."), "s.yaml", text).unwrap();
        let check = |metric: &str, floor: &str, of: &str| {
            let text = format!(
                "goal: g\nmetric: {{suite: s.yaml, name: {metric}, min_effect: 0.1}}\n\
                 floors: [{{suite: {of}, name: {floor}, max_drop: 0.1}}]\nedit: [recipe/**]\n"
            );
            check_names(&Goal::parse(&text, "goal.yaml").unwrap(), &suite, "s.yaml")
        };
        check("add/pass@1", "add/accuracy", "s.yaml").unwrap();
        check("add/pass@1", "other/accuracy", "t.yaml").unwrap();
        for (metric, floor) in [("add/pass@9", "add/accuracy"), ("add/pass@1", "add/acuracy")] {
            let failure = check(metric, floor, "s.yaml").unwrap_err();
            assert!(failure.class == Class::Usage && failure.message.contains("has no metric"), "{failure}");
        }
    }
}
