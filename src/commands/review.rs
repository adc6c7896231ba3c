//! `hone review`: the person's queue.

use super::campaign::Opened;
use crate::{
    cli::{Review, ReviewItem},
    output,
};
use hone_agent::{
    history::History,
    proposal::Decision,
    review::{self, Detail, Outcome, State},
};
use hone_runs::Result;
use std::fmt::Write;
use std::path::Path;

/// Runs one of the family.
pub fn run(command: &Review, json: bool) -> Result<()> {
    match command {
        Review::List { all, workspace } => list(workspace, *all, json),
        Review::Show(item) => show(item, json),
        Review::Keep(item) => decide(item, Decision::Keep, "", json),
        Review::Rollback(item) => decide(item, Decision::Rollback, "", json),
        Review::Iterate { item, note } => decide(item, Decision::Iterate, note, json),
    }
}

fn list(workspace: &Path, all: bool, json: bool) -> Result<()> {
    let opened = Opened::at(workspace)?;
    let mut items = Vec::new();
    for name in opened.runtime.block_on(opened.ledger.campaigns())? {
        let history = opened.runtime.block_on(History::load(&opened.ledger, &name))?;
        items.extend(review::items(&history).into_iter().filter(|item| all || item.open));
    }
    output::either(json, &items, || {
        if items.is_empty() {
            return "Nothing waits for review.".into();
        }
        let rows = items
            .iter()
            .map(|i| vec![i.id.clone(), state(i.state).into(), i.claim.clone(), i.flags.join(", "), i.branch.clone()]);
        output::table(&["item", "state", "claim", "flags", "branch"], rows)
    })
}

fn state(state: State) -> &'static str {
    match state {
        State::Waiting => "waits",
        State::Provisional => "kept, to be confirmed",
        State::Kept => "kept",
        State::RolledBack => "rolled back",
        State::Iterate => "iterate",
    }
}

/// The campaign and the round that an id names.
fn locate(opened: &Opened, id: &str) -> Result<(String, u32)> {
    let (campaign, round) = review::parse_id(id)?;
    Ok((opened.campaign(campaign)?, round))
}

fn show(item: &ReviewItem, json: bool) -> Result<()> {
    let opened = Opened::at(&item.workspace)?;
    let (campaign, round) = locate(&opened, &item.id)?;
    let history = opened.runtime.block_on(History::load(&opened.ledger, &campaign))?;
    let detail = review::detail(&opened.workspace, &history, round)?;
    output::either(json, &detail, || page(&detail))
}

fn page(detail: &Detail) -> String {
    let mut page = format!("round {}: {}\n{}\n", detail.round, detail.title, detail.hypothesis);
    let _ = writeln!(page, "proposed by {}, predicted {:+.3}", detail.source, detail.predicted_effect);
    if let Some(item) = &detail.item {
        let _ = writeln!(
            page,
            "claim  {}\nstate  {}\nbranch {} ({})",
            item.claim,
            state(item.state),
            item.branch,
            item.commit
        );
        if !item.flags.is_empty() {
            let _ = writeln!(page, "flags  {}", item.flags.join(", "));
        }
    }
    let _ = writeln!(page, "\n{}", detail.reason);
    if !detail.seeds.is_empty() {
        let rows = detail.seeds.iter().map(|line| {
            vec![
                line.stage.to_owned(),
                line.pair.seed.to_string(),
                format!("{:.3}", line.pair.candidate),
                format!("{:.3}", line.pair.incumbent),
                format!("{:+.3}", line.pair.candidate - line.pair.incumbent),
                line.folder.display().to_string(),
            ]
        });
        let header = ["stage", "seed", "candidate", "incumbent", "difference", "run"];
        let _ = writeln!(page, "\n{}", output::table(&header, rows));
    }
    let _ = writeln!(page, "\n{}", detail.diff);
    page
}

fn decide(item: &ReviewItem, decision: Decision, note: &str, json: bool) -> Result<()> {
    let opened = Opened::at(&item.workspace)?;
    let (campaign, round) = locate(&opened, &item.id)?;
    let (workspace, ledger) = (&opened.workspace, &opened.ledger);
    let outcome = opened.runtime.block_on(async {
        match decision {
            Decision::Keep => review::keep(workspace, ledger, &campaign, round).await,
            Decision::Rollback => review::rollback(workspace, ledger, &campaign, round).await,
            Decision::Iterate => review::iterate(workspace, ledger, &campaign, round, note).await,
        }
    })?;
    output::either(json, &outcome, || said(&outcome, &campaign))
}

fn said(outcome: &Outcome, campaign: &str) -> String {
    if !outcome.fresh {
        return "Decided before; nothing was done.".into();
    }
    match outcome.decision {
        Decision::Keep => match &outcome.kept_branch {
            Some(branch) => format!("Kept, on the branch {branch}. Take it over with `git merge {branch}`."),
            None => "Kept.".into(),
        },
        Decision::Rollback => {
            format!("Rolled back; the incumbent of {campaign} is {} now.", outcome.incumbent.subject.commit)
        }
        Decision::Iterate => "Noted; the next proposal will see it.".into(),
    }
}
