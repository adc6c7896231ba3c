//! Evaluation: ask a model every item of a subset, score what it says, and report each metric with interval, n and fingerprint. Knows
//! no model but through the trait, and compares no models: that is the judge's.

use crate::fingerprint::Fingerprint;
use crate::model::{Completion, Finish, LanguageModel};
use crate::stats::{self, Estimate};
use crate::suite::{Subset, Suite, SuiteTask};
use crate::task::Problem;
use hone_runs::{Class, Failure, Result, config, folder};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt::Write, path::Path};

/// The confidence level of all intervals in a report.
pub const LEVEL: f64 = 0.95;

/// Items sent to the model at once. Only progress depends on it: a completion's bits do not depend on its company.
const BATCH: usize = 64;

/// One metric: a score, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Metric {
    /// Measured.
    Score(Score),
    /// NaN, infinite or missing: never zero, never best.
    Invalid {
        /// Why.
        invalid: String,
    },
}

/// A measured value with its error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The value.
    pub value: f64,
    /// Lower end of the interval at [`LEVEL`].
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Standard error between items.
    pub standard_error: f64,
    /// Items.
    pub n: usize,
    /// Completions an item.
    pub k: usize,
}

/// What became of one item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ItemResult {
    /// The task's name in the suite.
    pub task: String,
    /// The problem's id.
    pub id: String,
    /// What the model was given.
    pub prompt: String,
    /// A right answer.
    pub answer: String,
    /// What it replied, with scores. Empty for texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<Sample>,
    /// Texts: nats lost, the sum over the predicted tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nats: Option<f64>,
    /// Texts: predicted tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Texts: the bytes they stand for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<usize>,
}

/// One completion of an item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its text.
    pub text: String,
    /// Its score, 0 to 1; absent where the scorer gave none that is a number.
    pub score: Option<f64>,
    /// Tokens generated.
    pub tokens: usize,
    /// Why it ended.
    pub finish: Finish,
}

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The suite's path in the workspace.
    pub suite: String,
    /// By name, such as `add/pass@1`.
    pub metrics: BTreeMap<String, Metric>,
    /// The confidence level of the intervals.
    pub level: f64,
    /// Tokens generated.
    pub tokens: u64,
    /// Hash of the fingerprint.
    pub fingerprint_hash: String,
    /// What it was measured with.
    pub fingerprint: Fingerprint,
    /// Every item with its completions, in the suite's order. Kept in a file of its own ([`Report::save`]).
    #[serde(skip)]
    pub items: Vec<ItemResult>,
}

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// The task at hand.
    pub task: &'a str,
    /// Items done, over all tasks.
    pub done: usize,
    /// Items in all.
    pub total: usize,
}

/// Scores `model` on the items of `subset`. `seed` keys the sampling. `progress` is called after each batch.
///
/// # Errors
/// When the subset has no items, or the model cannot answer. A score that is no number is not an error but an invalid metric.
pub fn evaluate(
    model: &dyn LanguageModel,
    suite: &Suite,
    subset: Subset,
    seed: u64,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Report> {
    let prompts = suite.tasks().iter().map(|task| prompts(model, task, &subset)).collect::<Result<Vec<_>>>()?;
    let fingerprint = Fingerprint::new(model, suite, subset, seed, &prompts)?;
    let total = prompts.iter().map(Vec::len).sum();
    let (mut metrics, mut items, mut tokens) = (BTreeMap::new(), Vec::new(), 0);
    for (task, prompts) in suite.tasks().iter().zip(&prompts) {
        let start = items.len();
        for (problems, prompts) in task.items(&subset)?.chunks(BATCH).zip(prompts.chunks(BATCH)) {
            let batch = if task.is_likelihood() {
                score_texts(model, task, problems, prompts)?
            } else {
                sample(model, task, problems, prompts, seed)?
            };
            tokens += batch.iter().flat_map(|item| &item.samples).map(|sample| sample.tokens as u64).sum::<u64>();
            items.extend(batch);
            progress(Progress { task: &task.entry().name, done: items.len(), total });
        }
        metrics.extend(measure(task, &items[start..]));
    }
    let fingerprint_hash = fingerprint.hash();
    Ok(Report { suite: suite.file().to_string(), metrics, level: LEVEL, tokens, fingerprint_hash, fingerprint, items })
}

/// What the model is given for each item: its prompt, in the chat template where the suite says so; for texts the text.
fn prompts(model: &dyn LanguageModel, task: &SuiteTask, subset: &Subset) -> Result<Vec<String>> {
    let of = |problem: &Problem| {
        if task.is_likelihood() {
            return Ok(problem.answer.clone());
        }
        let prompt = task.prompt(problem)?;
        if task.entry().template.is_some() { model.chat(&prompt) } else { Ok(prompt) }
    };
    task.items(subset)?.iter().map(of).collect()
}

fn sample(
    model: &dyn LanguageModel,
    task: &SuiteTask,
    problems: &[Problem],
    prompts: &[String],
    seed: u64,
) -> Result<Vec<ItemResult>> {
    let sampling = &task.entry().sampling;
    let replies = model.complete(prompts, sampling, seed)?;
    if replies.len() != prompts.len() || replies.iter().any(|reply| reply.len() != sampling.k) {
        let message =
            format!("The model did not give {} completions for each of {} prompts.", sampling.k, prompts.len());
        return Err(Failure::new(Class::Infrastructure, message).hint("this is a fault of the engine or the endpoint"));
    }
    let scored = |problem: &Problem, completion: Completion| Sample {
        score: Some(task.score(problem, &completion.text)).filter(|score| score.is_finite()),
        text: completion.text,
        tokens: completion.tokens,
        finish: completion.finish,
    };
    Ok(problems
        .iter()
        .zip(prompts)
        .zip(replies)
        .map(|((problem, prompt), reply)| {
            let samples = reply.into_iter().map(|completion| scored(problem, completion)).collect();
            ItemResult { samples, ..item(task, problem, prompt) }
        })
        .collect())
}

fn score_texts(
    model: &dyn LanguageModel,
    task: &SuiteTask,
    problems: &[Problem],
    texts: &[String],
) -> Result<Vec<ItemResult>> {
    let scores = model.score(texts)?;
    if scores.len() != texts.len() {
        return Err(Failure::new(
            Class::Infrastructure,
            format!("The model scored {} of {} texts.", scores.len(), texts.len()),
        )
        .hint("this is a fault of the engine or the endpoint"));
    }
    Ok(problems
        .iter()
        .zip(scores)
        .map(|(problem, score)| ItemResult {
            nats: Some(-score.logprob).filter(|nats| nats.is_finite()),
            tokens: Some(score.tokens),
            bytes: Some(score.bytes),
            ..item(task, problem, "")
        })
        .collect())
}

fn item(task: &SuiteTask, problem: &Problem, prompt: &str) -> ItemResult {
    ItemResult {
        task: task.entry().name.clone(),
        id: problem.id.clone(),
        prompt: prompt.to_string(),
        answer: problem.answer.clone(),
        samples: Vec::new(),
        nats: None,
        tokens: None,
        bytes: None,
    }
}

/// The metrics of a task, in the order of [`SuiteTask::metrics`].
fn measure(task: &SuiteTask, items: &[ItemResult]) -> Vec<(String, Metric)> {
    let k = task.entry().sampling.k;
    let found = if task.is_likelihood() {
        vec![per_unit(items, |item| item.tokens, 1.0), per_unit(items, |item| item.bytes, std::f64::consts::LN_2)]
    } else {
        let mut found = vec![accuracy(items, k), passes(items, k, 1)];
        if k > 1 {
            found.push(passes(items, k, k));
        }
        found
    };
    let k = if task.is_likelihood() { 1 } else { k };
    let metric = |estimate: Result<Estimate>| match estimate {
        Ok(Estimate { mean, standard_error, n, interval }) => {
            Metric::Score(Score { value: mean, low: interval.low, high: interval.high, standard_error, n, k })
        }
        Err(failure) => Metric::Invalid { invalid: failure.message },
    };
    task.metrics().into_iter().zip(found.into_iter().map(metric)).collect()
}

/// The mean score of completions.
fn accuracy(items: &[ItemResult], k: usize) -> Result<Estimate> {
    let means = items.iter().map(|item| stats::mean(&scores(item)?)).collect::<Result<Vec<_>>>()?;
    stats::mean_score(&means, k, LEVEL)
}

/// The chance that of `at` completions one is fully right, estimated from k.
fn passes(items: &[ItemResult], k: usize, at: usize) -> Result<Estimate> {
    let pass = |item: &ItemResult| {
        let right = scores(item)?.iter().filter(|score| **score >= 1.0).count();
        stats::pass_at_k(k, right, at)
    };
    let rates = items.iter().map(pass).collect::<Result<Vec<_>>>()?;
    // One estimate of pass@k uses all k samples of its item, which then count once.
    stats::mean_score(&rates, k / at, LEVEL)
}

/// Nats lost a token, or (over ln 2) bits lost a byte.
fn per_unit(items: &[ItemResult], size: impl Fn(&ItemResult) -> Option<usize>, scale: f64) -> Result<Estimate> {
    let nats = |item: &ItemResult| item.nats.ok_or_else(|| missing(item)).map(|nats| nats / scale);
    let lost = items.iter().map(nats).collect::<Result<Vec<_>>>()?;
    let sizes: Vec<f64> = items.iter().map(|item| size(item).unwrap_or(0) as f64).collect();
    stats::ratio(&lost, &sizes, LEVEL)
}

fn scores(item: &ItemResult) -> Result<Vec<f64>> {
    item.samples.iter().map(|sample| sample.score.ok_or_else(|| missing(item))).collect()
}

fn missing(item: &ItemResult) -> Failure {
    Failure::new(Class::Candidate, format!("The item {} of `{}` has no finite score.", item.id, item.task))
}

impl Report {
    /// The score of `metric`.
    ///
    /// # Errors
    /// [`Class::Candidate`] when it is invalid, [`Class::Usage`] with the nearest name when there is none.
    pub fn score(&self, metric: &str) -> Result<&Score> {
        match self.metrics.get(metric) {
            Some(Metric::Score(score)) => Ok(score),
            Some(Metric::Invalid { invalid }) => {
                Err(Failure::new(Class::Candidate, format!("{metric} is invalid: {invalid}"))
                    .hint("look for the first NaN or infinite value in the run's metrics"))
            }
            None => {
                let names: Vec<&str> = self.metrics.keys().map(String::as_str).collect();
                let near = config::nearest(metric, names.iter().copied());
                let hint = near.map_or_else(
                    || format!("its metrics: {}", names.join(", ")),
                    |name| format!("did you mean `{name}`?"),
                );
                Err(Failure::new(Class::Usage, format!("The report has no metric `{metric}`.")).hint(hint))
            }
        }
    }

    /// Writes the report as JSON to `path` and its items as JSON Lines beside it (`report.json` → `report.samples.jsonl`), each whole.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where the disk refuses.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut lines = String::new();
        for item in &self.items {
            lines += &serde_json::to_string(item).expect("an item is JSON");
            lines.push('\n');
        }
        // The report last: where it stands, its samples stand too.
        folder::write_atomic(&path.with_extension("samples.jsonl"), lines.as_bytes())?;
        folder::write_json(path, self)
    }

    /// A table for people: one metric a line.
    pub fn table(&self) -> String {
        let shown: Vec<[String; 4]> = self
            .metrics
            .iter()
            .map(|(name, metric)| match metric {
                Metric::Score(s) => {
                    let interval = format!("{:.4} to {:.4}", s.low, s.high);
                    let n = if s.k > 1 { format!("{} x {}", s.n, s.k) } else { s.n.to_string() };
                    [name.clone(), format!("{:.4}", s.value), interval, n]
                }
                Metric::Invalid { invalid } => [name.clone(), "invalid".into(), invalid.clone(), String::new()],
            })
            .collect();
        let head =
            ["metric".to_string(), "value".into(), format!("{:.0}% interval", self.level * 100.0), "items".into()];
        let width =
            |column: usize| shown.iter().chain([&head]).map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..4).map(width).collect();
        let mut table = String::new();
        for row in [&head].into_iter().chain(&shown) {
            let [name, value, interval, n] = row;
            let line = format!("{name:<0$}  {value:>1$}  {interval:<2$}  {n}", widths[0], widths[1], widths[2]);
            let _ = writeln!(table, "{}", line.trim_end());
        }
        let _ = writeln!(
            table,
            "{} · {} · fingerprint {}",
            self.suite,
            self.fingerprint.subset,
            &self.fingerprint_hash[..12]
        );
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Sampling, TextScore};
    use crate::task::point;
    use serde_json::{Map, Value, json};

    /// Answers sums rightly in the share `skill` of samples; loses `loss` nats a byte.
    struct Adder {
        skill: f64,
        loss: f64,
        dtype: &'static str,
    }

    impl LanguageModel for Adder {
        fn complete(&self, prompts: &[String], sampling: &Sampling, seed: u64) -> Result<Vec<Vec<Completion>>> {
            let reply = |prompt: &String, i: usize| {
                let (a, b) = prompt.trim_end_matches('=').split_once('+').unwrap();
                let sum = a.parse::<u64>().unwrap() + b.parse::<u64>().unwrap();
                let right = point("skill", &format!("{prompt}{seed}{i}")) < self.skill;
                let text = if right { sum.to_string() } else { "0".into() };
                Completion { text, tokens: 3, finish: Finish::Stop }
            };
            Ok(prompts.iter().map(|prompt| (0..sampling.k).map(|i| reply(prompt, i)).collect()).collect())
        }

        fn score(&self, texts: &[String]) -> Result<Vec<TextScore>> {
            let of = |text: &String| {
                let bytes = text.len() - 1;
                TextScore { logprob: -self.loss * bytes as f64, tokens: bytes, bytes }
            };
            Ok(texts.iter().map(of).collect())
        }

        fn identity(&self) -> Map<String, Value> {
            Map::from_iter([
                ("checkpoint".into(), json!(format!("adder-{}", self.skill))),
                ("dtype".into(), json!(self.dtype)),
            ])
        }
    }

    fn adder(skill: f64) -> Adder {
        Adder { skill, loss: 1.0, dtype: "f32" }
    }

    fn suite(sampling: &str) -> Suite {
        let text = format!(
            "tasks:\n- name: add\n  data: {{native: addition, digits: 3, n: 400}}\n  sampling: {{{sampling}}}\n"
        );
        Suite::parse(Path::new("."), "evals/add.yaml", &text).unwrap()
    }

    fn report(model: &Adder, suite: &Suite) -> Report {
        evaluate(model, suite, Subset::HELD_OUT, 7, &mut |_| {}).unwrap()
    }

    #[test]
    fn scores_hold_the_models_skill() {
        let suite = suite("temperature: 1, k: 4");
        let report = report(&adder(0.3), &suite);
        let items = suite.tasks()[0].items(&Subset::HELD_OUT).unwrap().len();
        let pass = report.score("add/pass@1").unwrap();
        assert!(pass.low < 0.3 && 0.3 < pass.high, "{pass:?}");
        assert_eq!((pass.n, pass.k), (items, 4));
        // Independent samples: 1 − 0.7⁴.
        let any = report.score("add/pass@4").unwrap();
        assert!(any.low < 0.7599 && 0.7599 < any.high, "{any:?}");
        assert_eq!(report.score("add/accuracy").unwrap().value, pass.value);
        assert_eq!(report.tokens, items as u64 * 4 * 3);
        assert_eq!(report.items.len(), items);
        let by_hand: f64 = report.items.iter().flat_map(|item| &item.samples).filter_map(|sample| sample.score).sum();
        assert!((by_hand / (4 * items) as f64 - pass.value).abs() < 1e-12);
        assert!(report.score("add/pass@2").unwrap_err().hint.unwrap().contains("pass@"));
    }

    #[test]
    fn a_perfect_model_scores_one_without_certainty() {
        let report = report(&adder(1.0), &suite("k: 1"));
        let pass = report.score("add/pass@1").unwrap();
        assert_eq!((pass.value, pass.high), (1.0, 1.0));
        assert!(pass.low > 0.97 && pass.low < 1.0);
    }

    #[test]
    fn texts_give_loss_and_bits() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.txt"), (0..3000).map(|i| format!("{i} ")).collect::<String>()).unwrap();
        let text = "tasks:\n- name: t\n  data: {native: text, file: t.txt, length: 100}\n";
        let suite = Suite::parse(dir.path(), "t.yaml", text).unwrap();
        let report = report(&adder(0.0), &suite);
        assert!((report.score("t/loss").unwrap().value - 1.0).abs() < 1e-12);
        assert!((report.score("t/bits_per_byte").unwrap().value - 1.0 / std::f64::consts::LN_2).abs() < 1e-12);
    }

    #[test]
    fn nan_is_invalid_and_never_zero() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.txt"), (0..3000).map(|i| format!("{i} ")).collect::<String>()).unwrap();
        let text = "tasks:\n- name: t\n  data: {native: text, file: t.txt, length: 100}\n";
        let suite = Suite::parse(dir.path(), "t.yaml", text).unwrap();
        let broken = report(&Adder { loss: f64::NAN, ..adder(0.0) }, &suite);
        assert_eq!(broken.score("t/loss").unwrap_err().class, Class::Candidate);
        let json = serde_json::to_value(&broken).unwrap();
        assert!(json["metrics"]["t/loss"]["invalid"].is_string() && json["metrics"]["t/loss"]["value"].is_null());
        assert!(broken.table().contains("invalid"));
    }

    #[test]
    fn fingerprints_tell_how_and_not_which_model() {
        let (one, four) = (suite("k: 1"), suite("temperature: 1, k: 4"));
        let base = report(&adder(0.5), &one);
        let better = evaluate(&adder(0.9), &one, Subset::HELD_OUT, 8, &mut |_| {}).unwrap();
        base.fingerprint.comparable(&better.fingerprint).unwrap();
        assert_ne!(base.fingerprint_hash, better.fingerprint_hash);
        assert_eq!(base.fingerprint_hash, report(&adder(0.5), &one).fingerprint_hash);

        let other = report(&Adder { dtype: "bf16", ..adder(0.5) }, &one);
        assert_eq!(base.fingerprint.differences(&other.fingerprint), ["model.dtype"]);
        let message = base.fingerprint.comparable(&report(&adder(0.5), &four).fingerprint).unwrap_err().message;
        assert!(message.contains("tasks.add.sampling.k"), "{message}");
        let dev = evaluate(&adder(0.5), &one, Subset::DEV, 7, &mut |_| {}).unwrap();
        assert!(base.fingerprint.comparable(&dev.fingerprint).is_err());
    }

    #[test]
    fn reports_are_saved_whole_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        let suite = suite("k: 1");
        let (mut calls, mut last) = (0, 0);
        let report = evaluate(&adder(0.5), &suite, Subset::held_out_fold(0, 2), 7, &mut |p| {
            calls += 1;
            assert!(p.done > last && p.done <= p.total);
            last = p.done;
        })
        .unwrap();
        assert_eq!((calls, last), (report.items.len().div_ceil(BATCH), report.items.len()));
        report.save(&path).unwrap();
        let read: Report = folder::read_json(&path).unwrap().unwrap();
        assert_eq!(read, Report { items: Vec::new(), ..report.clone() });
        assert_eq!(read.fingerprint.hash(), read.fingerprint_hash);
        let lines = std::fs::read_to_string(dir.path().join("report.samples.jsonl")).unwrap();
        let first: ItemResult = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        assert_eq!(first, report.items[0]);
        let table = report.table();
        assert!(
            table.starts_with("metric") && table.contains("add/pass@1") && table.contains("held_out 1/2"),
            "{table}"
        );
    }

    #[test]
    fn chat_needs_a_model_with_a_template() {
        let text = "tasks:\n- name: add\n  data: {native: addition}\n  template: chat\n";
        let suite = Suite::parse(Path::new("."), "s.yaml", text).unwrap();
        let failure = evaluate(&adder(1.0), &suite, Subset::DEV, 0, &mut |_| {}).unwrap_err();
        assert!(failure.message.contains("no chat template"));
    }
}
