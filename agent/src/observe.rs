//! What a proposer is shown: a bounded digest of the ledger and of the incumbent's runs. Text from runs is data and is cleaned; held-out
//! items and paths outside the workspace are not in it.

use crate::admit::editable_files;
use crate::campaign::Campaign;
use crate::digest::{self, LogDigest, Series, clean, cut};
use crate::history::{History, Round};
use crate::judge::Verdict;
use crate::prompt::TEMPLATES;
use crate::proposal::{FailedSample, Incumbent, Metric, Observation, Past};
use crate::record::{self, Observed, Status};
use hone_evals::evaluate::ItemResult;
use hone_evals::stats;
use hone_evals::suite::Subset;
use hone_runs::alarm::{self, Alarm};
use hone_runs::{Result, metrics};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Failed samples at most, and characters of each of their texts.
const SAMPLES: usize = 8;
const SAMPLE_TEXT: usize = 300;
/// Alarms at most.
const ALARMS: usize = 20;

impl Campaign {
    pub(crate) fn observation(&self, round: u32, observed: &Observed) -> Result<Observation> {
        let goal = self.goal();
        let history = self.history();
        let incumbent = &observed.incumbent;
        let commit = &incumbent.subject.commit;
        let scores = history.screening_scores(incumbent);
        let mean = scores.iter().sum::<f64>() / scores.len().max(1) as f64;
        let interval = stats::t_mean(&scores, 0.95).map_or([mean, mean], |e| [e.interval.low, e.interval.high]);
        let seed = history.middle_seed(incumbent);
        let folder = self.folder(&incumbent.subject, seed);
        Ok(Observation {
            goal: goal.goal.clone(),
            metric: Metric {
                name: goal.metric.name.clone(),
                direction: goal.metric.direction,
                min_effect: goal.metric.min_effect,
            },
            campaign: history.name.clone(),
            seed: self.started().seed,
            round,
            rounds_left: goal.budget.rounds + 1 - round,
            incumbent: Incumbent { commit: commit.clone(), scores, mean, interval },
            edit: goal.edit.clone(),
            files: editable_files(&self.workspace, &self.scope, commit)?,
            prompts: self.prompts()?,
            recipe_path: goal.run.recipe.clone(),
            recipe_schema: self.tools.recipe_schema.clone(),
            resolved: resolved(&folder.join("manifest.json")),
            history: history.rounds.range(..round).map(|(number, past)| recall(*number, past)).collect(),
            // A run without curves or alarms shows none: that is not an error of the loop.
            curves: metrics::read(&folder).map(|m| reproducible(digest::curves(&m))).unwrap_or_default(),
            alarms: alarms(&folder.join(alarm::FILE)),
            failed_samples: self.failed_samples(&history, commit, seed),
            notes: observed.notes.clone(),
            failed_run: self.failed_run(&history, round),
        })
    }

    /// The workspace's own templates, by path, as the trusted commit has them: protected, whatever the goal opens.
    fn prompts(&self) -> Result<BTreeMap<String, String>> {
        let mut own = BTreeMap::new();
        for (name, _) in TEMPLATES {
            let path = format!("prompts/{name}");
            if self.workspace.read(&self.started().trusted, &path)?.is_some() {
                let text = self.workspace.text(&self.started().trusted, &path)?;
                own.insert(path, text);
            }
        }
        Ok(own)
    }

    /// The newest candidate run that failed, where one of the last rounds had one: why, and its log.
    fn failed_run(&self, history: &History, round: u32) -> Option<String> {
        let failed = |past: &Round| {
            past.ruling.as_ref().is_some_and(|r| matches!(r.verdict, Verdict::Invalid | Verdict::Incomplete))
        };
        let (number, last) = history.rounds.range(..round).rev().take(3).find(|(_, past)| failed(past))?;
        let (candidate, observed) = (last.candidate.as_ref()?, last.observed.as_ref()?);
        let subject = self.subject_of(candidate);
        let mut seeds = (0..50)
            .map(|i| self.started().screening_seed(observed.incumbent.since, i))
            .chain((0..50).map(|i| self.started().confirmation_seed(*number, i)));
        let (seed, reason) = seeds.find_map(|seed| match &history.trained(&subject.commit, seed)?.status {
            Status::Done => None,
            Status::Invalid { reason } | Status::Incomplete { reason } => Some((seed, reason.clone())),
        })?;
        let log = File::open(self.folder(&subject, seed).join("stderr.log")).ok()?;
        Some(format!("Round {number}: {reason}\n{}", LogDigest::read(BufReader::new(log)).text()))
    }

    /// Dev items that the incumbent got wrong with a seed.
    fn failed_samples(&self, history: &History, commit: &str, seed: u64) -> Vec<FailedSample> {
        let suite = &self.goal().metric.suite;
        let task = self.goal().metric.name.split('/').next().unwrap_or_default();
        let report = history
            .measured(commit, seed, &Subset::DEV)
            .and_then(|m| m.reports.iter().find(|r| r.suite == *suite))
            .map(|r| self.workspace.runs_path(&self.name).join(&r.path).with_extension("samples.jsonl"));
        let Some(file) = report.and_then(|path| File::open(path).ok()) else { return Vec::new() };
        let text = |text: &str| cut(&clean(text), SAMPLE_TEXT);
        let lines = BufReader::new(file).lines().map_while(std::result::Result::ok);
        let items =
            lines.filter_map(|line| serde_json::from_str::<ItemResult>(&line).ok()).filter(|item| item.task == task);
        let wrong = items.filter_map(|item| {
            let sample = item.samples.iter().find(|s| s.score.is_none_or(|score| score < 1.0))?;
            Some(FailedSample { prompt: text(&item.prompt), expected: text(&item.answer), got: text(&sample.text) })
        });
        wrong.take(SAMPLES).collect()
    }
}

/// The curves without those that a clock made: what is proposed must not depend on how fast a machine was.
fn reproducible(mut curves: BTreeMap<String, Series>) -> BTreeMap<String, Series> {
    curves.retain(|name, _| !["_per_second", "_seconds"].iter().any(|end| name.ends_with(end)));
    curves
}

/// A round as later proposals see it.
fn recall(number: u32, round: &Round) -> Past {
    let ruling = round.ruling.as_ref();
    let estimate = ruling.and_then(record::Ruling::estimate);
    let flags = round.admitted().map(|a| a.flags.clone()).unwrap_or_default();
    Past {
        round: number,
        proposal: round.proposed.as_ref().and_then(|p| p.answer.as_ref().ok().cloned()),
        changes: round.admitted().map(|a| a.changes.clone()).unwrap_or_default(),
        verdict: ruling.map(|r| r.verdict),
        effect: estimate.map(|e| e.effect),
        interval: estimate.and_then(|e| e.interval),
        refusal: round.refusal().or_else(|| ruling.filter(|_| estimate.is_none()).map(|r| r.reason.clone())),
        decision: round.decision(),
        flags: flags.into_iter().chain(ruling.map(|r| r.flags.clone()).unwrap_or_default()).collect(),
    }
}

/// The recipe in a run's manifest, with the model's sizes in place of its preset; null where there is none.
fn resolved(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut manifest: Value = serde_json::from_str(&text).unwrap_or_default();
    let mut part = |name| manifest.get_mut(name).map(Value::take).filter(Value::is_object);
    let (Some(Value::Object(mut recipe)), model) = (part("recipe"), part("model")) else { return Value::Null };
    recipe.extend(model.map(|model| ("model".to_string(), model)));
    Value::Object(recipe)
}

fn alarms(path: &Path) -> Vec<Alarm> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    let lines = BufReader::new(file).lines().map_while(std::result::Result::ok);
    lines.filter_map(|line| serde_json::from_str(&line).ok()).take(ALARMS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_clock_is_shown_to_a_proposer() {
        let names = ["stages.0/train/loss", "stages.0/train/tokens_per_second", "stages.0/train/step_seconds"];
        let curves = names.map(|name| (name.to_string(), Series::default())).into();
        assert_eq!(reproducible(curves).into_keys().collect::<Vec<_>>(), ["stages.0/train/loss"]);
    }
}
