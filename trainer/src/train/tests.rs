//! Runs from recipe to checkpoint: what they leave, how they end, and that an interrupted one ends the same.

use super::*;
use std::collections::BTreeMap;

const TINY: &str = "model: {layers: 2, softmax_every: 2, hidden_size: 16, heads: 2, kv_heads: 1, head_dim: 8, rotary_dim: 4, \
                    intermediate_size: 24, experts: 2, block: 4}\ntokenizer: chars\n";

/// Two stages that end by their shares of the compute, with checkpoints at odd places.
fn recipe(more: &str) -> Recipe {
    let text = format!(
        "{TINY}compute: {{tokens: 9k}}\ncheckpoints: {{every: 3, keep: 2}}\n\
         stages:\n  - sft: {{task: addition, digits: 1, examples: 60, batch: 256, lr: 3e-3}}\n  \
         - rl: {{task: addition, digits: 1, prompts: 6, group: 4, max_tokens: 4, minibatches: 2, epochs: 2, dynamic_sampling: false}}\n{more}"
    );
    Recipe::parse(&text, "recipe.yaml", &[]).unwrap()
}

fn options(out: &Path) -> TrainOptions {
    TrainOptions { out: out.to_path_buf(), seed: 11, threads: 1, ..TrainOptions::default() }
}

/// Asks to stop before step `at` + 1, and keeps what it saw.
#[derive(Default)]
struct Watcher {
    at: Option<u64>,
    steps: u64,
    kinds: Vec<&'static str>,
    seen: Vec<BTreeMap<String, f64>>,
}

impl Observer for Watcher {
    fn step(&mut self, progress: &Progress) {
        self.steps = progress.step;
        self.kinds.push(progress.kind);
        self.seen.push(progress.metrics.iter().map(|(name, value)| (name.to_string(), *value)).collect());
    }
    fn stop(&mut self) -> Option<Class> {
        (self.at == Some(self.steps)).then_some(Class::Terminated)
    }
}

#[test]
fn a_run_goes_through_its_stages_and_leaves_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let mut watcher = Watcher::default();
    let outcome = train(&recipe(""), &options(dir.path()), &mut watcher).unwrap();
    assert_eq!((outcome.stop, outcome.steps), (Stop::Budget, watcher.steps));
    let switch = watcher.kinds.iter().position(|k| *k == "rl").unwrap();
    assert!(switch > 3 && watcher.kinds[switch..].iter().all(|k| *k == "rl") && watcher.kinds.len() > switch + 3);

    // Each stage ends at the first step boundary past its part.
    let share = |i: usize| watcher.seen[i]["train/share"];
    assert!(share(switch - 1) >= 0.5 && share(switch - 2) < 0.5);
    let last = watcher.seen.len() - 1;
    assert!(share(last) >= 1.0 && share(last - 1) < 1.0);
    assert_eq!(outcome.tokens as f64, watcher.seen[last]["train/tokens"]);

    let loaded = checkpoint::load(&dir.path().join(&outcome.checkpoint), true).unwrap();
    assert_eq!(loaded.hash, outcome.hash);
    let kept: Vec<_> = std::fs::read_dir(dir.path().join(CHECKPOINTS)).unwrap().flatten().collect();
    assert_eq!(kept.iter().filter(|e| e.file_name().to_string_lossy().starts_with("step-")).count(), 2);
    let metrics = hone_runs::metrics::read(dir.path()).unwrap();
    assert_eq!(metrics.series("train/loss").len(), outcome.steps as usize);
    assert_eq!(metrics.last("rollout/bit_diff_share"), Some(0.0));
    let manifest: serde_json::Value = folder::read_json(&dir.path().join("manifest.json")).unwrap().unwrap();
    assert_eq!(manifest["recipe"]["stages"][0]["sft"]["digits"], 1);
    assert!(manifest["parameters"].as_u64().unwrap() > 1000);
}

#[test]
fn a_run_broken_anywhere_ends_as_the_unbroken_one() {
    let whole = tempfile::tempdir().unwrap();
    let mut watcher = Watcher::default();
    let want = train(&recipe(""), &options(whole.path()), &mut watcher).unwrap();
    let switch = watcher.kinds.iter().position(|k| *k == "rl").unwrap() as u64;
    let curves = hone_runs::metrics::read(whole.path()).unwrap();
    // Before the first step, off and on a checkpoint's step, around the change of stage, at the end; once and several times.
    for stops in [vec![0, 3, 4, switch], vec![2, switch - 1, switch + 1], vec![want.steps - 1]] {
        let dir = tempfile::tempdir().unwrap();
        for &at in &stops {
            let options = TrainOptions { resume: true, ..options(dir.path()) };
            let mut watcher = Watcher { at: Some(at), steps: first_step(dir.path()), ..Watcher::default() };
            let failure = train(&recipe(""), &options, &mut watcher).unwrap_err();
            assert_eq!(failure.class, Class::Terminated, "{failure}");
        }
        let options = TrainOptions { resume: true, threads: 2, ..options(dir.path()) };
        let got = train(&recipe(""), &options, &mut ()).unwrap();
        assert_eq!(
            (got.hash, got.steps, got.tokens),
            (want.hash.clone(), want.steps, want.tokens),
            "stopped at {stops:?}"
        );
        let resumed = hone_runs::metrics::read(dir.path()).unwrap();
        for name in ["train/loss", "train/lr", "rl/reward"] {
            let values =
                |m: &hone_runs::metrics::Metrics| m.series(name).iter().map(|p| (p.step, p.value)).collect::<Vec<_>>();
            assert_eq!(values(&resumed), values(&curves), "{name}, stopped at {stops:?}");
        }
    }
}

fn first_step(run: &Path) -> u64 {
    let newest = checkpoint::latest(&run.join(CHECKPOINTS));
    newest.map_or(0, |p| p.file_name().unwrap().to_str().unwrap()["step-".len()..].parse().unwrap())
}

/// Copies the run's folder before a step, as a kill would leave it.
struct Killer<'a> {
    at: u64,
    steps: u64,
    run: &'a Path,
    copy: &'a Path,
}

impl Observer for Killer<'_> {
    fn step(&mut self, progress: &Progress) {
        self.steps = progress.step;
    }
    fn stop(&mut self) -> Option<Class> {
        if self.steps == self.at {
            copy(self.run, self.copy);
        }
        None
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target)
        } else {
            assert!(std::fs::copy(entry.path(), target).is_ok())
        }
    }
}

#[test]
fn a_killed_run_loses_only_the_steps_since_its_checkpoint() {
    let (run, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut killer = Killer { at: 8, steps: 0, run: run.path(), copy: killed.path() };
    let want = train(&recipe(""), &options(run.path()), &mut killer).unwrap();
    // A save that was cut off, and metrics torn in the middle of a line.
    let torn = killed.path().join(CHECKPOINTS).join("step-7");
    std::fs::create_dir(&torn).unwrap();
    std::fs::write(torn.join("model.safetensors"), b"half").unwrap();
    std::fs::write(killed.path().join("metrics.jsonl"), {
        let mut text = std::fs::read(killed.path().join("metrics.jsonl")).unwrap();
        text.truncate(text.len() - 9);
        text
    })
    .unwrap();
    let mut watcher = Watcher::default();
    let options = TrainOptions { resume: true, ..options(killed.path()) };
    let got = train(&recipe(""), &options, &mut watcher).unwrap();
    assert_eq!(got.hash, want.hash);
    assert_eq!(watcher.seen.len() as u64, want.steps - 6, "it went on from the checkpoint of step 6");

    // Finished: asked again, it answers without another step.
    let mut again = Watcher::default();
    assert_eq!(train(&recipe(""), &options, &mut again).unwrap(), got);
    assert!(again.seen.is_empty());
}

#[test]
fn a_run_is_resumed_only_as_what_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut watcher = Watcher { at: Some(2), ..Watcher::default() };
    train(&recipe(""), &options(dir.path()), &mut watcher).unwrap_err();
    let refused = |recipe: &Recipe, options: &TrainOptions| {
        let failure = train(recipe, options, &mut ()).unwrap_err();
        assert_eq!(failure.class, Class::Usage, "{failure}");
        failure.message
    };
    assert!(refused(&recipe(""), &options(dir.path())).contains("already holds a run"));
    let resume = TrainOptions { resume: true, ..options(dir.path()) };
    assert!(refused(&recipe("optimizer: {lr: 2e-3}\n"), &resume).contains("another recipe"));
    assert!(refused(&recipe(""), &TrainOptions { seed: 12, ..resume }).contains("another recipe"));
}

#[test]
fn a_finished_run_answers_only_as_what_it_was() {
    let dir = tempfile::tempdir().unwrap();
    // A fresh folder: resuming begins.
    let resume = TrainOptions { resume: true, max_steps: Some(2), ..options(dir.path()) };
    let done = train(&recipe(""), &resume, &mut ()).unwrap();
    assert_eq!(train(&recipe(""), &resume, &mut ()).unwrap(), done);
    let other = recipe("optimizer: {lr: 2e-3}\n");
    for (recipe, seed) in [(recipe(""), 12), (other, 11)] {
        let failure = train(&recipe, &TrainOptions { seed, ..resume.clone() }, &mut ()).unwrap_err();
        assert_eq!(failure.class, Class::Usage, "{failure}");
        assert!(failure.message.contains("another recipe"), "{failure}");
    }
    assert_eq!(train(&recipe(""), &resume, &mut ()).unwrap(), done, "a refusal changes nothing");
}

#[test]
fn divergence_is_the_candidates_fault_and_keeps_the_last_good_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let diverging = recipe("optimizer: {lr: 1e-3, clip: 1e30, warmup: 0}\n");
    let text = serde_json::to_string(&diverging).unwrap().replace("0.003", "1e30");
    let diverging = Recipe::parse(&text, "recipe.yaml", &[]).unwrap();
    let good = Recipe { checkpoints: crate::recipe::CheckpointSpec { every: 1, keep: 9 }, ..diverging };
    let failure = train(&good, &options(dir.path()), &mut ()).unwrap_err();
    assert_eq!((failure.class, failure.class.exit_code()), (Class::Candidate, 5));
    assert!(failure.message.contains("stage 0, sft") && failure.hint.is_some(), "{failure}");
    if let Some(path) = checkpoint::latest(&dir.path().join(CHECKPOINTS)) {
        assert!(!checkpoint::load(&path, false).unwrap().decoder.weights.has_non_finite());
    }
    assert!(!dir.path().join(RESULT).exists());
}

#[test]
fn steps_and_callers_limits_end_a_run_too() {
    let dir = tempfile::tempdir().unwrap();
    let by_steps = Recipe::parse(
        &format!("{TINY}compute: {{tokens: 1M}}\nstages:\n  - sft: {{digits: 1, batch: 64, steps: 3}}\n  - sft: {{digits: 1, batch: 64, steps: 2}}\n"),
        "r",
        &[],
    )
    .unwrap();
    let outcome = train(&by_steps, &options(dir.path()), &mut ()).unwrap();
    assert_eq!((outcome.stop, outcome.steps), (Stop::Steps, 5));
    let dir = tempfile::tempdir().unwrap();
    let outcome = train(&by_steps, &TrainOptions { max_steps: Some(4), ..options(dir.path()) }, &mut ()).unwrap();
    assert_eq!((outcome.stop, outcome.steps), (Stop::MaxSteps, 4));
}

#[test]
fn a_run_can_start_from_anothers_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let first =
        TrainOptions { workspace_root: root.path().into(), max_steps: Some(2), ..options(&root.path().join("one")) };
    let before = train(&recipe(""), &first, &mut ()).unwrap();
    let text = "model: {from: one}\nstages: [sft: {digits: 1, steps: 0}]\n";
    let recipe = Recipe::parse(text, "r", &[]).unwrap();
    let outcome = train(&recipe, &TrainOptions { out: root.path().join("two"), ..first.clone() }, &mut ()).unwrap();
    let load = |run: &str, outcome: &TrainOutcome| {
        checkpoint::load(&root.path().join(run).join(&outcome.checkpoint), false).unwrap()
    };
    let (one, two) = (load("one", &before), load("two", &outcome));
    assert_eq!(one.model_hash, two.model_hash);
    let text = text.replace("model", "tokenizer: bytes\nmodel");
    let other = Recipe::parse(&text, "r", &[]).unwrap();
    let failure = train(&other, &TrainOptions { out: root.path().join("three"), ..first }, &mut ()).unwrap_err();
    assert!(failure.message.contains("another tokenizer"), "{failure}");
}

#[test]
fn two_processes_do_not_train_in_one_folder() {
    let dir = tempfile::tempdir().unwrap();
    let held = RunFolder::open(&dir.path().join(CHECKPOINTS)).unwrap().try_lock().unwrap();
    let failure = train(&recipe(""), &options(dir.path()), &mut ()).unwrap_err();
    assert!(failure.message.contains("Another process"), "{failure}");
    drop(held);
}
