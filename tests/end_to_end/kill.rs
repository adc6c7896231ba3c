//! kill -9 at any moment, then --resume: the checkpoint is that of the run nobody touched.

use crate::support::{expect, hone, json, rl_recipe, write};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

fn train(recipe: &Path, out: &Path) -> std::process::Command {
    let mut command = hone();
    command.args(["train", "--json", "--threads", "1", "--seed", "3", "--resume", "--out"]).arg(out).arg(recipe);
    command
}

#[test]
fn training_killed_at_20_random_moments_ends_with_the_hash_of_the_unbroken_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &rl_recipe(60_000));
    let begun = std::time::Instant::now();
    let whole = json(&expect(&mut train(&recipe, &folder.path().join("whole")), 0));
    let length = begun.elapsed();

    let broken = folder.path().join("broken");
    let mut killed = 0;
    let mut draw = hone_runs::draws(20, "kill", 0, 0);
    while killed < 20 {
        let mut child =
            train(&recipe, &broken).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts");
        // Mostly within the first third of a run, so that one run is killed many times before it ends.
        let share = f64::from(rand::Rng::next_u32(&mut draw)) / f64::from(u32::MAX);
        std::thread::sleep(Duration::from_secs_f64(length.as_secs_f64() * 0.33 * share));
        let ended = child.try_wait().expect("its state").is_some();
        child.kill().expect("a signal");
        child.wait().expect("its end");
        killed += 1;
        if ended {
            check(&whole, &json(&expect(&mut train(&recipe, &broken), 0)));
            std::fs::remove_dir_all(&broken).expect("a folder");
        }
    }
    check(&whole, &json(&expect(&mut train(&recipe, &broken), 0)));
}

fn check(whole: &Value, resumed: &Value) {
    assert!(whole["hash"].as_str().is_some_and(|h| h.len() >= 32), "{whole}");
    for key in ["hash", "steps", "tokens", "flops"] {
        assert_eq!(whole[key], resumed[key], "{key}");
    }
}

#[test]
fn sigterm_saves_the_state_and_exits_143() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = write(folder.path(), "recipe.yaml", &rl_recipe(3_000_000));
    let out = folder.path().join("run");
    let mut child =
        train(&recipe, &out).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts");
    let metrics = out.join("metrics.jsonl");
    while std::fs::metadata(&metrics).map_or(0, |m| m.len()) < 2000 {
        assert!(child.try_wait().expect("its state").is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(20));
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGTERM)
        .expect("a signal");
    assert_eq!(child.wait().expect("its end").code(), Some(143));
    let checkpoints = std::fs::read_dir(out.join("checkpoints")).expect("a folder").flatten();
    assert!(checkpoints.count() > 0, "nothing was saved");
}
