//! What a recipe or a goal needs, said before it is spent.

use crate::support::{SUITE, expect, hone, json, rl_recipe, sft_recipe, stderr, write};

const GOAL: &str = "goal: add\nmetric: {suite: evals/addition.yaml, name: addition/pass@1, min_effect: 0.2}\n\
                    edit: [recipe/**]\nruns: {parallel: 3}\n";

#[test]
fn a_recipes_needs_are_a_table_and_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &rl_recipe(20_000));
    let table = expect(hone().arg("plan").arg(&recipe), 0).stdout;
    let table = String::from_utf8(table).expect("text");
    for part in [
        "stage 0, sft",
        "stage 1, rl",
        "the run",
        "optimizer moments",
        "kept by lightning layers",
        "rollout caches",
        "total",
        "parameters",
        "compute     20.0k tokens",
        "disk",
        "timed just now",
    ] {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }

    let plan = json(&expect(hone().args(["--json", "plan", "--no-measure", "--threads", "1"]).arg(&recipe), 0));
    assert_eq!((&plan["fits"], &plan["runs"], &plan["measured"]), (&true.into(), &1.into(), &serde_json::Value::Null));
    let parts = plan["memory"].as_object().expect("parts").values();
    assert_eq!(plan["memory_total"].as_u64(), Some(parts.map(|bytes| bytes.as_u64().expect("bytes")).sum()));
    let weights = plan["memory"]["weights"].as_u64();
    assert_eq!(plan["params"].as_u64().map(|n| 4 * n), weights);
    // What the plan says of a checkpoint is what a run writes, but for names.
    let out = folder.path().join("run");
    expect(hone().args(["train", "--out"]).arg(&out).arg(&recipe), 0);
    let checkpoints = std::fs::read_dir(out.join("checkpoints")).expect("a folder").flatten();
    let newest = checkpoints.map(|e| e.path()).find(|p| p.join("hone.json").exists()).expect("a checkpoint");
    let size = |name| std::fs::metadata(newest.join(name)).expect("a file").len();
    let written = size("model.safetensors") + size("optimizer.safetensors");
    let planned = plan["checkpoint"].as_u64().expect("bytes");
    assert!((planned..planned + 20_000).contains(&written), "{written} bytes written, {planned} planned");
}

#[test]
fn a_goals_runs_share_the_machine() {
    let folder = tempfile::tempdir().expect("a folder");
    let goal = write(folder.path(), "goal.yaml", GOAL);
    write(folder.path(), "recipe/recipe.yaml", &sft_recipe(1000));
    write(folder.path(), "evals/addition.yaml", SUITE);
    let one = json(&expect(hone().args(["--json", "plan"]).arg(folder.path().join("recipe/recipe.yaml")), 0));
    let three = json(&expect(hone().current_dir(folder.path()).args(["--json", "plan"]), 0));
    assert_eq!((&three["runs"], &three["params"]), (&3.into(), &one["params"]));
    assert!(three["campaign"]["detectable"].as_f64().is_some_and(|effect| effect > 0.0), "{three}");
    assert!(three["time"].as_f64().is_some_and(|seconds| seconds > 0.0), "{three}");
    let table = expect(hone().args(["plan", "--no-measure"]).arg(&goal), 0).stdout;
    assert!(String::from_utf8_lossy(&table).contains("3 runs at a time"));
}

/// Memory is the machine's affair, so the exit code is infrastructure's; what does not fit is shown all the same.
#[test]
fn what_does_not_fit_is_refused_with_what_to_lower() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &sft_recipe(1000));
    for (set, lower) in [
        ("model={preset: small, hidden_size: 30000, intermediate_size: 30000}", "`hidden_size`"),
        ("stages.0.sft={batch: 2000000000, micro_batch: 2000000000}", "`micro_batch`"),
    ] {
        let refused = expect(hone().args(["plan", "--set", set]).arg(&recipe), 6);
        let said = stderr(&refused);
        assert!(said.contains("of memory, and this machine gives") && said.contains(lower), "{said}");
        assert!(String::from_utf8_lossy(&refused.stdout).contains("total"));
        let refused = expect(hone().args(["--json", "plan", "--set", set]).arg(&recipe), 6);
        assert_eq!(json(&refused)["fits"], false);
    }
    let suite = write(folder.path(), "suite.yaml", SUITE);
    assert!(stderr(&expect(hone().arg("plan").arg(&suite), 2)).contains("is a suite"));
}
