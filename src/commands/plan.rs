//! `hone plan`: what a goal or recipe needs before anything is spent, beside what this machine has.

use super::{files, root_of, threads};
use crate::{cli, cli::FileKind, output};
use hone_agent::goal::{Goal, Parallel, Replicates};
use hone_evals::suite::Suite;
use hone_runs::{
    Class, Failure, Result,
    failure::Context,
    launcher::{Limits, Slots},
};
use hone_trainer::{
    memory::Memory,
    plan::{self, Measured, Plan},
    recipe::Recipe,
};
use serde::Serialize;
use std::path::Path;

/// What is printed as JSON.
#[derive(Serialize)]
struct Shown<'a> {
    file: String,
    /// Runs that go on side by side.
    runs: usize,
    /// What they may take together; None where the system does not tell.
    memory_given: Option<u64>,
    fits: bool,
    #[serde(flatten)]
    plan: &'a Plan,
    /// A step of each stage, timed; None where none was.
    measured: Option<&'a [Measured]>,
    /// Seconds of a run, by those.
    time: Option<f64>,
    /// Of a goal.
    campaign: Option<Campaign>,
}

/// What a goal adds to its recipe.
#[derive(Serialize)]
struct Campaign {
    rounds: u32,
    /// The fewest and the most runs of a comparison, on either side.
    replicates: [usize; 2],
    /// The smallest effect that is worth keeping.
    min_effect: f64,
    /// The smallest that a confirmation shows, at a score near one half; None where the suite cannot say.
    detectable: Option<f64>,
}

impl Campaign {
    fn of(goal: &Goal, root: &Path) -> Result<Self> {
        let suite = Suite::load(root, &goal.metric.suite)?;
        let Replicates { fewest, most } = goal.runs.replicates;
        Ok(Self {
            rounds: goal.budget.rounds,
            replicates: [fewest, most],
            min_effect: goal.metric.min_effect,
            detectable: goal.detectable(&suite)?,
        })
    }
}

/// Prints the plan, and fails where the machine has too little memory for it.
pub fn run(args: &cli::Plan, json: bool) -> Result<()> {
    let root = root_of(&args.file, args.workspace.as_deref())?;
    let name = args.file.display().to_string();
    let text = std::fs::read_to_string(&args.file).context(Class::Usage, || format!("Cannot read {name}"))?;
    let (recipe, runs, threads, campaign) = match files::kind_of(&text, &name)? {
        FileKind::Goal => {
            let goal = Goal::parse(&text, &name)?;
            let runs = match goal.runs.parallel {
                Parallel::Auto => Slots::all_cores().cores,
                Parallel::At(n) => n,
            };
            let campaign = Some(Campaign::of(&goal, &root)?);
            (root.join(&goal.run.recipe), runs, args.compute.threads.max(1), campaign)
        }
        FileKind::Recipe => {
            let cores = Slots::all_cores().cores;
            let threads = if threads(&args.compute) == 0 { cores } else { threads(&args.compute) };
            (args.file.clone(), 1, threads, None)
        }
        FileKind::Suite => {
            return Err(Failure::new(Class::Usage, format!("{name} is a suite, which needs no training."))
                .hint("name a goal or a recipe"));
        }
    };
    let recipe = Recipe::read(&recipe, &args.set)?;
    let plan = plan::plan(&recipe, &root, threads)?;
    let needed = plan.memory_total.saturating_mul(runs as u64);
    let memory_given = Limits::guards().memory.map(|bytes| bytes.0);
    let fits = memory_given.is_none_or(|given| needed <= given);
    let measured = if fits && !args.no_measure { plan::measure(&recipe, &root, &plan, threads)? } else { None };
    let time = measured.as_ref().and_then(|measured| plan.time(measured));
    let shown =
        Shown { file: name, runs, memory_given, fits, plan: &plan, measured: measured.as_deref(), time, campaign };
    output::either(json, &shown, || human(&shown))?;
    match memory_given {
        Some(given) if !fits => Err(refusal(&plan, runs, needed, given)),
        _ => Ok(()),
    }
}

fn refusal(plan: &Plan, runs: usize, needed: u64, given: u64) -> Failure {
    let (needed, one) = (output::bytes(needed), plan.memory_total);
    let who = if runs > 1 { format!("{runs} runs at a time need") } else { "The run needs".into() };
    let message = format!("{who} {needed} of memory, and this machine gives {}.", output::bytes(given));
    let remedy = if one <= given { "lower `runs.parallel` of the goal" } else { plan.remedy() };
    Failure::new(Class::Infrastructure, message).hint(remedy)
}

/// The table of parts and stages, and a line for each of the rest.
fn human(shown: &Shown) -> String {
    let plan = shown.plan;
    let mut columns: Vec<(String, &Memory)> =
        plan.stages.iter().enumerate().map(|(i, s)| (format!("stage {i}, {}", s.kind), &s.memory)).collect();
    if columns.len() > 1 {
        columns.push(("the run".into(), &plan.memory));
    }
    let header: Vec<&str> = ["memory"].into_iter().chain(columns.iter().map(|(head, _)| head.as_str())).collect();
    let parts = plan.memory.parts().into_iter().enumerate().filter(|(_, (_, most))| *most > 0);
    let cell = |bytes: u64| if bytes == 0 { String::new() } else { output::bytes(bytes) };
    let mut rows: Vec<Vec<String>> = parts
        .map(|(part, (name, _))| {
            [name.to_owned()].into_iter().chain(columns.iter().map(|(_, m)| cell(m.parts()[part].1))).collect()
        })
        .collect();
    rows.push(["total".to_owned()].into_iter().chain(columns.iter().map(|(_, m)| cell(m.total()))).collect());

    let given = shown.memory_given.map_or_else(String::new, |given| format!(" of {}", output::bytes(given)));
    let together = match shown.runs {
        1 => String::new(),
        n => format!(", {n} runs at a time: {}", output::bytes(plan.memory_total.saturating_mul(n as u64))),
    };
    let spent = plan.spending().map_or_else(
        || "ends by time".into(),
        |s| format!("{} tokens, {:.2e} FLOPs", output::count(s.tokens as u64), s.flops),
    );
    let mut lines = vec![
        format!("memory      {}{together}{given}", output::bytes(plan.memory_total)),
        format!("parameters  {}, {} active a token", output::count(plan.params), output::count(plan.active)),
        format!("compute     {spent}"),
        format!("disk        {} for checkpoints of {}", output::bytes(plan.disk), output::bytes(plan.checkpoint)),
    ];
    if let Some(measured) = shown.measured {
        let rates: Vec<String> = plan
            .stages
            .iter()
            .zip(measured)
            .map(|(stage, m)| format!("{} {:.0} tokens/s", stage.kind, m.tokens as f64 / m.seconds))
            .collect();
        let time = shown.time.map_or_else(String::new, |s| format!("about {}: ", span(s)));
        lines.push(format!("time        {time}{}, by one step of each stage, timed just now", rates.join(", ")));
    }
    if let Some(Campaign { rounds, replicates: [fewest, most], min_effect, detectable }) = &shown.campaign {
        let shows = detectable.map_or_else(String::new, |effect| format!(", shown from about {effect:.3}"));
        lines.push(format!("campaign    {rounds} rounds, comparisons of {fewest} to {most} runs"));
        lines.push(format!("effect      {min_effect} asked for{shows}"));
    }
    format!("{}\n\n{}", output::table(&header, rows), lines.join("\n"))
}

/// Seconds as people read them.
fn span(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
