//! The binary, small recipes, small workspaces.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The built binary, with an environment of its own.
pub fn hone() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hone"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// Runs to the end; panics with both streams where the exit code is another.
pub fn expect(command: &mut Command, code: i32) -> Output {
    let output = command.output().expect("the binary starts");
    assert_eq!(
        output.status.code(),
        Some(code),
        "{command:?}\n--- stdout\n{}\n--- stderr\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// What a command printed on stdout, as JSON.
pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON document on stdout")
}

/// What a command printed on stderr.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Writes `text` to `name` below `folder`; gives its path.
pub fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    std::fs::write(&path, text).expect("a file");
    path
}

/// A model that trains in well under a second a hundred steps.
pub const MODEL: &str =
    "{preset: hybrid-nano, hidden_size: 16, intermediate_size: 16, experts: 2, experts_per_token: 1}";

/// One-digit addition, supervised, with checkpoints every few steps; `tokens` is the budget.
pub fn sft_recipe(tokens: u64) -> String {
    format!(
        "model: {MODEL}\ntokenizer: chars\ncompute: {{tokens: {tokens}}}\ncheckpoints: {{every: 7}}\n\
         stages:\n  - sft: {{task: addition, digits: 1, batch: 128}}\n"
    )
}

/// As [`sft_recipe`], with reinforcement after.
pub fn rl_recipe(tokens: u64) -> String {
    sft_recipe(tokens) + "  - rl: {task: addition, digits: 1, prompts: 4, group: 4, max_tokens: 4}\n"
}

/// A suite of one-digit addition.
pub const SUITE: &str = "tasks:\n  - name: addition\n    data: {native: addition, digits: 1, n: 20}\n    \
                         splits: {dev: 0.5, held_out: 0.5}\n    sampling: {temperature: 0, max_tokens: 4, k: 1}\n";
