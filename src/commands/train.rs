//! `hone train`: the trainer on its own.

use super::{root_of, threads};
use crate::{cli, output};
use hone_runs::{Class, Result};
use hone_trainer::{
    alarm::Alarm,
    recipe::Recipe,
    train::{Observer, Progress, TrainOptions, train},
};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Trains a recipe, shows how it goes, prints where it came out.
pub fn run(args: &cli::Train, json: bool) -> Result<()> {
    let recipe = Recipe::read(&args.recipe, &args.set)?;
    let options = TrainOptions {
        out: args.out.clone(),
        seed: args.seed,
        threads: threads(&args.compute),
        resume: args.resume,
        workspace_root: root_of(&args.recipe, args.workspace.as_deref())?,
        max_steps: None,
    };
    let outcome = train(&recipe, &options, &mut Display::new()?)?;
    output::either(json, &outcome, || {
        format!(
            "{} steps, {} tokens, {:.2e} FLOPs in {:.1} s.\ncheckpoint {}\nhash       {}",
            outcome.steps,
            outcome.tokens,
            outcome.flops,
            outcome.seconds,
            options.out.join(&outcome.checkpoint).display(),
            outcome.hash,
        )
    })
}

/// The signal that asked the run to stop: 0 none, else its class.
static ASKED: AtomicU8 = AtomicU8::new(0);

/// A bar on a terminal, a line now and then elsewhere.
struct Display {
    bar: Option<ProgressBar>,
    last_line: Instant,
}

/// Seconds between progress lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Display {
    fn new() -> Result<Self> {
        listen()?;
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {percent:>3}%  {msg}  {elapsed} (left {eta})")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(1000).with_style(style)
        });
        Ok(Self { bar, last_line: Instant::now() })
    }
}

impl Observer for Display {
    fn step(&mut self, progress: &Progress) {
        let shown = ["train/loss", "rl/reward"];
        let values: Vec<String> = progress
            .metrics
            .iter()
            .filter(|(name, _)| shown.contains(name))
            .map(|(name, value)| format!("{} {value:.3}", name.rsplit('/').next().unwrap_or(name)))
            .collect();
        let message = format!(
            "{} ({}/{})  step {}  {}",
            progress.kind,
            progress.stage + 1,
            progress.stages,
            progress.step,
            values.join("  ")
        );
        if let Some(bar) = &self.bar {
            bar.set_position((progress.share * 1000.0) as u64);
            bar.set_message(message);
        } else if self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            output::say(&format!("{:>3.0}%  {message}", progress.share * 100.0));
        }
    }

    fn alarm(&mut self, alarm: &Alarm) {
        let line = format!(
            "alarm at step {}: {} ({} {:.3}): {}",
            alarm.step, alarm.cause, alarm.metric, alarm.value, alarm.remedy
        );
        match &self.bar {
            Some(bar) => bar.println(line),
            None => output::say(&line),
        }
    }

    fn stop(&mut self) -> Option<Class> {
        match ASKED.load(Ordering::Relaxed) {
            0 => None,
            2 => Some(Class::Interrupted),
            _ => Some(Class::Terminated),
        }
    }
}

/// Notes SIGINT and SIGTERM, so that the run saves its state at the next step's end. A second one ends it at once.
fn listen() -> Result<()> {
    let runtime = super::runtime()?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut interrupt), Ok(mut terminate)) =
                (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
            else {
                return;
            };
            loop {
                let asked = tokio::select! { _ = interrupt.recv() => 2u8, _ = terminate.recv() => 15u8 };
                if ASKED.swap(asked, Ordering::Relaxed) != 0 {
                    std::process::exit(if asked == 2 { 130 } else { 143 });
                }
                output::say("stopping at the end of this step; once more to stop at once");
            }
        });
    });
    Ok(())
}
