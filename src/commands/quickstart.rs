//! `hone quickstart`: the whole loop on a fresh workspace, offline, and what to type next.

use super::{campaign, init};
use crate::{
    cli::{self, CampaignRun, Template},
    output,
};
use hone_agent::campaign::Options;
use hone_runs::Result;

/// Makes the workspace, runs the campaign, shows what came of it.
pub fn run(args: &cli::Quickstart, json: bool) -> Result<()> {
    init::create(&args.dir, Template::Reverse)?;
    let dir = args.dir.display().to_string();
    output::say(&format!("made the workspace {dir}: goal.yaml, recipe/, evals/, a git repository of its own"));
    let goal = CampaignRun { goal: args.dir.join("goal.yaml"), rounds: Some(args.rounds), seed: args.seed };
    let overview = campaign::start(&goal, &Options { rounds: goal.rounds, seed: goal.seed })?;
    output::either(json, &overview, || {
        let review = match overview.queue.iter().find(|item| item.open) {
            Some(item) => format!("  hone review show {0}\n  hone review keep {0}", item.id),
            None => format!("  hone campaign status {}", overview.campaign),
        };
        format!("{}\n\nWhat next:\n  cd {dir}\n{review}\n  hone campaign run --rounds 8", campaign::page(&overview))
    })
}
