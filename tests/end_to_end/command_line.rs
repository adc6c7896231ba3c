//! Commands from outside: what they print, what they refuse and how they exit.

use crate::support::{SUITE, expect, hone, json, rl_recipe, sft_recipe, stderr, write};
use std::path::Path;

#[test]
fn train_eval_generate_logprobs_work_on_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &rl_recipe(20_000));
    let suite = write(folder.path(), "suite.yaml", SUITE);
    let run = folder.path().join("run");
    let done = json(&expect(hone().args(["--json", "train", "--threads", "1", "--out"]).arg(&run).arg(&recipe), 0));
    assert!(done["tokens"].as_u64().is_some_and(|t| t >= 20_000), "{done}");
    for file in ["manifest.json", "metrics.jsonl", "result.json"] {
        assert!(run.join(file).exists(), "{file}");
    }
    let events = std::fs::read_dir(run.join("tensorboard")).expect("a folder").flatten();
    assert!(events.map(|e| e.file_name()).any(|n| n.to_string_lossy().contains("tfevents")));

    let report = json(&expect(hone().args(["--json", "eval", "--model"]).arg(&run).arg(&suite), 0));
    let score = &report["metrics"]["addition/pass@1"];
    let (low, value, high) = (score["low"].as_f64(), score["value"].as_f64(), score["high"].as_f64());
    assert!(low <= value && value <= high && score["n"].as_u64() > Some(0), "{report}");

    let samples = json(&expect(hone().args(["--json", "generate", "--prompt", "1+2=", "--model"]).arg(&run), 0));
    assert_eq!(samples.as_array().map(Vec::len), Some(1));

    let tokens = write(folder.path(), "tokens.jsonl", "{\"tokens\":[1,2,3]}\n{\"tokens\":[4]}\n");
    let lines = expect(hone().args(["logprobs", "--model"]).arg(&run).arg("--tokens").arg(&tokens), 0).stdout;
    let lines: Vec<serde_json::Value> =
        String::from_utf8_lossy(&lines).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let logprobs: Vec<f64> = lines[0]["logprobs"].as_array().expect("a list").iter().flat_map(|x| x.as_f64()).collect();
    assert_eq!(logprobs.len(), 2);
    let loss = lines[0]["loss"].as_f64().expect("a number");
    assert!((loss + logprobs.iter().sum::<f64>() / 2.0).abs() < 1e-6);
    assert_eq!(lines[1], serde_json::json!({"logprobs": [], "loss": null}));
    let top =
        expect(hone().args(["logprobs", "--top", "2", "--model"]).arg(&run).arg("--tokens").arg(&tokens), 0).stdout;
    let top: serde_json::Value =
        serde_json::from_slice(top.split(|b| *b == b'\n').next().expect("a line")).expect("JSON");
    assert_eq!(top["logprobs"], lines[0]["logprobs"]);
    let places = top["top"].as_array().expect("a list");
    assert!(places.len() == 2 && places.iter().all(|p| p.as_array().is_some_and(|p| p.len() == 2)), "{top}");
    assert!(places[0][0][1].as_f64() >= places[0][1][1].as_f64() && places[0][0][1].as_f64() >= Some(logprobs[0]));
}

#[test]
fn a_misspelt_key_names_file_line_and_the_nearest_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = sft_recipe(1000).replace("tokenizer:", "tokeniser:");
    let recipe = write(folder.path(), "recipe.yaml", &text);
    for command in [vec!["validate"], vec!["train", "--out", "unused"]] {
        let said = stderr(&expect(hone().current_dir(folder.path()).args(command).arg(&recipe), 2));
        assert!(said.contains("recipe.yaml:2:"), "{said}");
        assert!(said.contains("did you mean `tokenizer`?"), "{said}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_program_quietly() {
    for arguments in
        [&["reference"][..], &["schema", "recipe"], &["completions", "bash"], &["runs", "list"], &["no-such"]]
    {
        let mut command = hone();
        command.args(arguments).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        drop(child.stdout.take());
        let expected = if arguments == ["no-such"] {
            drop(child.stderr.take());
            2
        } else {
            0
        };
        let output = child.wait_with_output().expect("its end");
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(expected), ""), "{arguments:?}");
    }
    // A failure that nobody can read is still told by its exit code.
    let mut child =
        hone().args(["validate", "no-such.yaml"]).stderr(std::process::Stdio::piped()).spawn().expect("it starts");
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("its end").code(), Some(2));
}

#[test]
fn a_goal_whose_suite_cannot_show_the_effect_is_warned_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let goal = |effect: f64| {
        format!(
            "goal: add\nmetric: {{suite: evals/addition.yaml, name: addition/pass@1, min_effect: {effect}}}\n\
             edit: [recipe/**]\nruns: {{replicates: 2..3}}\n"
        )
    };
    write(folder.path(), "recipe/recipe.yaml", &sft_recipe(1000));
    write(folder.path(), "evals/addition.yaml", &SUITE.replace("digits: 1, n: 20", "digits: 3, n: 2000"));
    let file = write(folder.path(), "goal.yaml", &goal(0.01));
    let few = expect(hone().arg("validate").arg(&file), 0);
    assert!(
        stderr(&few).contains("warning: evals/addition.yaml has few items for `min_effect: 0.01`"),
        "{}",
        stderr(&few)
    );
    let found = json(&expect(hone().args(["--json", "validate"]).arg(&file), 0));
    assert_eq!(found["warnings"].as_array().map(Vec::len), Some(1), "{found}");
    write(folder.path(), "goal.yaml", &goal(0.2));
    let enough = expect(hone().arg("validate").arg(&file), 0);
    assert_eq!(stderr(&enough), "");
}

#[test]
fn a_recipe_that_diverges_exits_5_and_keeps_the_last_good_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &sft_recipe(100_000));
    let run = folder.path().join("run");
    let wild = ["--set", "optimizer.lr=1e12", "--set", "optimizer.warmup=40", "--set", "optimizer.clip=1e9"];
    let said = stderr(&expect(hone().args(["train", "--out"]).arg(&run).args(wild).arg(&recipe), 5));
    assert!(said.contains("hint:"), "{said}");
    assert!(!run.join("result.json").exists());
}

#[test]
fn the_reference_pages_are_what_the_program_says() {
    let schema = |kind| ["schema", "--markdown", kind];
    let pages: [(&str, &[&str]); 4] = [
        ("goal", &schema("goal")),
        ("recipe", &schema("recipe")),
        ("suite", &schema("suite")),
        ("commands", &["reference"]),
    ];
    for (name, arguments) in pages {
        let page = expect(hone().args(arguments), 0).stdout;
        let path = format!("{}/docs/reference/{name}.md", env!("CARGO_MANIFEST_DIR"));
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        let made = String::from_utf8_lossy(&page);
        assert_eq!(kept, made, "stale: hone {} > docs/reference/{name}.md", arguments.join(" "));
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &rl_recipe(15_000));
    let hash = |threads: &str| {
        let out = folder.path().join(threads);
        let mut command = hone();
        command.args(["--json", "train", "--threads", threads, "--out"]).arg(out).arg(&recipe);
        json(&expect(&mut command, 0))["hash"].clone()
    };
    assert_eq!(hash("1"), hash("2"));
}

/// As far as that can be seen without the runs that they go on from.
#[test]
fn the_books_recipes_and_suites_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/recipes");
    let yaml = |folder: &Path| {
        let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        files.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect::<Vec<_>>()
    };
    let files = [yaml(&folder), yaml(&folder.join("suites"))].concat();
    assert!(files.len() >= 9, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a file");
        // These need what another run or the reader provides; their keys are checked before that is looked for.
        if text.contains("from: runs/") || text.contains("file: text.txt") {
            let said = String::from_utf8(expect(hone().arg("validate").arg(&file), 2).stderr).expect("text");
            assert!(said.contains("There is no checkpoint") || said.contains("text.txt"), "{said}");
        } else {
            expect(hone().arg("validate").arg(&file), 0);
        }
    }
}
