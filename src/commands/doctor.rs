//! `hone doctor`: what this machine has, and what would stand in the way.

use crate::output;
use hone_runs::{Result, launcher};
use hone_trainer::config::Dtype;
use serde_json::{Value, json};

/// Prints a line a finding; nothing here fails.
pub fn run(json: bool) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let findings = [
        ("hone", json!(env!("CARGO_PKG_VERSION"))),
        ("cores", json!(cores)),
        ("vector", json!(hone_trainer::engine::instruction_set())),
        ("products", json!(if Dtype::Bf16.here() == "bf16" { "f32, bf16" } else { "f32" })),
        ("memory", json!(memory())),
        ("git", json!(first_line("git", &["--version"]))),
        ("device", json!("cpu")),
        ("OPENAI_API_KEY", json!(if std::env::var_os("OPENAI_API_KEY").is_some() { "present" } else { "absent" })),
    ];
    let all: serde_json::Map<String, Value> = findings.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
    output::either(json, &all, || {
        let line = |(name, value): &(&str, Value)| {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            format!("{name:<15} {}", if value.is_null() { "not found" } else { &text })
        };
        findings.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}

/// Memory of the machine, where the system tells.
fn memory() -> Option<String> {
    launcher::machine_memory().map(output::bytes)
}

fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program).args(args).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned())
}
