//! `hone selftest`: faults put into small campaigns of this very program.

use crate::{cli, output};
use hone_agent::chaos::{self, Chaos, Fault, Outcome};
use hone_runs::{Class, Failure, Result, failure::Context};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const FILES: [(&str, &str); 3] = [
    ("goal.yaml", include_str!("../templates/selftest/goal.yaml")),
    ("recipe/recipe.yaml", include_str!("../templates/selftest/recipe.yaml")),
    ("evals/addition.yaml", include_str!("../templates/selftest/addition.yaml")),
];

/// Tries each kind of fault and shows what came of it.
pub fn run(args: &cli::Selftest, json: bool) -> Result<()> {
    if let Some(folder) = &args.small_disk {
        chaos::enter_small_disk(folder)?;
        let outcome = prepare(args, folder)?.try_out(Fault::Disk, &|_| {})?;
        return output::json(&outcome);
    }
    let faults = args.only.map_or(Fault::ALL.to_vec(), |only| vec![only.into()]);
    let place = tempfile::Builder::new().prefix("hone-selftest-").tempdir();
    let place = place.context(Class::Infrastructure, || "A folder for the trials cannot be made".into())?;
    let bar = indicatif::ProgressBar::new_spinner();
    bar.enable_steady_tick(std::time::Duration::from_millis(100));
    bar.set_message("an undisturbed campaign, to compare with");
    let chaos = if faults == [Fault::Disk] { None } else { Some(prepare(args, place.path())?) };
    let mut outcomes = Vec::new();
    for fault in faults {
        let outcome = match &chaos {
            Some(chaos) if fault != Fault::Disk => {
                chaos.try_out(fault, &|at| bar.set_message(format!("{}: {at}", name(fault))))?
            }
            _ => {
                bar.set_message("a full disk");
                on_a_small_disk(args, place.path())?
            }
        };
        if !json {
            bar.suspend(|| output::say(&format!("{}: {}", name(fault), word(&outcome))));
        }
        outcomes.push(outcome);
    }
    bar.finish_and_clear();
    output::either(json, &outcomes, || {
        let rows = outcomes.iter().map(|o| {
            vec![
                name(o.fault).into(),
                o.faults.to_string(),
                o.campaigns.to_string(),
                format!("{:.0} s", o.seconds),
                word(o),
            ]
        });
        output::wrapping(&[4], &["fault", "times", "campaigns", "took", "outcome"], rows)
    })?;
    if outcomes.iter().any(|o| !o.differences.is_empty()) {
        let kept = place.keep();
        return Err(Failure::new(Class::Integrity, "A fault left a trace that an undisturbed campaign does not have.")
            .hint(format!("The workspaces lie in {}; please report it.", kept.display())));
    }
    Ok(())
}

fn prepare(args: &cli::Selftest, folder: &Path) -> Result<Chaos> {
    Chaos::prepare(&program()?, folder, &FILES, args.kills, args.seed)
}

fn program() -> Result<PathBuf> {
    std::env::current_exe().context(Class::Infrastructure, || "This program's own file cannot be found".into())
}

/// The trial of the full disk needs a process that has not begun a thread: another of this program.
fn on_a_small_disk(args: &cli::Selftest, folder: &Path) -> Result<Outcome> {
    let disk = folder.join("small-disk");
    std::fs::create_dir(&disk).context(Class::Infrastructure, || format!("{} cannot be made", disk.display()))?;
    let mut command = Command::new(program()?);
    command.args(["--json", "selftest", "--chaos", "--seed", &args.seed.to_string(), "--small-disk"]).arg(&disk);
    let output = command.stdin(Stdio::null()).output();
    let output = output.context(Class::Infrastructure, || "This program cannot be started again".into())?;
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).or_else(|_| {
        if !said.contains("A small disk of this process's own cannot be made") {
            return Err(Failure::new(Class::Other, format!("The trial of the full disk failed: {}", said.trim())));
        }
        Ok(Outcome {
            fault: Fault::Disk,
            faults: 0,
            campaigns: 0,
            differences: Vec::new(),
            skipped: Some("this machine gives no user and mount namespaces".into()),
            seconds: 0.0,
        })
    })
}

impl From<cli::Fault> for Fault {
    fn from(fault: cli::Fault) -> Self {
        match fault {
            cli::Fault::Kill => Self::Kill,
            cli::Fault::Pause => Self::Pause,
            cli::Fault::Clock => Self::Clock,
            cli::Fault::Disk => Self::Disk,
            cli::Fault::Git => Self::Git,
        }
    }
}

fn name(fault: Fault) -> &'static str {
    match fault {
        Fault::Kill => "kill -9",
        Fault::Pause => "paused processes",
        Fault::Clock => "clock jumps",
        Fault::Disk => "full disk",
        Fault::Git => "50 candidates at once",
    }
}

fn word(outcome: &Outcome) -> String {
    match (&outcome.skipped, outcome.differences.is_empty()) {
        (Some(why), _) => format!("not tried: {why}"),
        (None, true) => "no difference".into(),
        (None, false) => outcome.differences.join("\n"),
    }
}
