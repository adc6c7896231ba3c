//! A suite: the tasks that a model is scored on, as a person writes them in `suite.yaml`, and the items of each split. Not the scoring
//! itself, which is in `evaluate.rs`.

use crate::model::Sampling;
use crate::scorer::{Scorer, Scoring};
pub use crate::split::{Split, Splits, Subset};
use crate::stats;
use crate::task::{JsonLines, NATIVE_TASKS, Problem, Task, TaskSpec, digest, rank};
use handlebars::Handlebars;
use hone_runs::{Class, Failure, Result, config};
use rand_chacha::ChaCha8Rng;
use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Items of a native task where a suite does not say how many.
const NATIVE_ITEMS: usize = 400;
/// Items of a task at most: all are held in memory, and a slip of some zeros would take all of it.
const MOST_ITEMS: usize = 10_000_000;

/// What stands in a suite file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SuiteFile {
    /// The tasks; each gives metrics of its name, such as `add/pass@1`.
    pub tasks: Vec<Entry>,
}

/// One task of a suite file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// What its metrics are called by: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Where its items come from.
    pub data: Data,
    /// Which share of the items is for what, by item hash. Default for native tasks: half dev, half held out (training has items of its
    /// own). Files of questions must name theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub splits: Option<Splits>,
    /// A Handlebars template of the prompt over the item's fields. Default: the item's own prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// `chat`: the prompt is sent as a user's message, in the model's own chat template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Template>,
    /// How completions are scored. Default: the native task's own verifier; `exact` for files of questions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scorer: Option<Scoring>,
    /// How completions are sampled.
    #[serde(default)]
    pub sampling: Sampling,
}

/// Where the items of a task come from: `native` with its parameters, or `file` with `sha256`, `question` and `answer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// A native task: `addition`, `reverse`, `countdown` or `text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub native: Option<String>,
    /// Addition: digits of each operand. Default 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digits: Option<usize>,
    /// Reverse: letters of the text, default 8. Countdown: how many numbers, default 4. Text: bytes a passage, default 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// At most this many items, dev and held-out together. Default: 400 of a native task, all of a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// A file of the workspace: JSON Lines with a question and an answer a row; for `native: text`, the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The file's SHA-256, so that a changed file is noticed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The key of the question in each row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub question: Option<String>,
    /// The key of the answer in each row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// How a prompt reaches the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Template {
    /// As a user's message, in the model's own chat template.
    Chat,
}

/// A suite with its items.
pub struct Suite {
    file: String,
    hash: String,
    tasks: Vec<SuiteTask>,
}

/// One task of a suite with its items.
pub struct SuiteTask {
    entry: Entry,
    task: Box<dyn Task>,
    scorer: Scorer,
    templates: Handlebars<'static>,
    /// In the order of their fold hashes.
    dev: Vec<Problem>,
    held_out: Vec<Problem>,
}

impl Suite {
    /// Reads the suite file `file` and its data; both are relative to `root`, the workspace.
    ///
    /// # Errors
    /// [`Class::Usage`] with place and hint where something does not fit; [`Class::Integrity`] where a data file has another hash.
    pub fn load(root: &Path, file: &str) -> Result<Self> {
        let text = std::fs::read_to_string(root.join(file)).map_err(|e| {
            usage(format!("Cannot read {file}: {e}."))
                .hint("suites are named relative to the workspace, such as evals/add.yaml")
        })?;
        Self::parse(root, file, &text)
    }

    /// As [`Suite::load`], from the text of a suite file; `file` is what messages call it.
    ///
    /// # Errors
    /// As [`Suite::load`].
    pub fn parse(root: &Path, file: &str, text: &str) -> Result<Self> {
        let content: SuiteFile = config::parse(text, file)?;
        // Of the content and not of the file: a comment changes nothing.
        let hash = digest(&["suite", &serde_json::to_string(&content).expect("a suite is JSON")]);
        if content.tasks.is_empty() {
            return Err(usage("The suite has no tasks.").hint("add one under `tasks:`").at(file));
        }
        let mut tasks: Vec<SuiteTask> = Vec::new();
        for entry in content.tasks {
            let name = entry.name.clone();
            let place = || place_of(file, text, &name);
            if tasks.iter().any(|task| task.entry.name == entry.name) {
                return Err(usage("Two tasks have this name.")
                    .hint("metrics are told apart by it: rename one")
                    .at(place()));
            }
            tasks.push(SuiteTask::new(root, entry).map_err(|f| if f.at.is_some() { f } else { f.at(place()) })?);
        }
        Ok(Self { file: file.to_string(), hash, tasks })
    }

    /// What messages call it: its path in the workspace.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Hash of everything the suite file says. The data's hashes are each task's own ([`SuiteTask::data_hash`]).
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Its tasks, in the file's order.
    pub fn tasks(&self) -> &[SuiteTask] {
        &self.tasks
    }

    /// The names of the metrics that a report on this suite has.
    pub fn metrics(&self) -> Vec<String> {
        self.tasks.iter().flat_map(SuiteTask::metrics).collect()
    }

    /// The task that gives `metric`.
    ///
    /// # Errors
    /// [`Class::Usage`] with the nearest name where there is none.
    pub fn task_of(&self, metric: &str) -> Result<&SuiteTask> {
        self.tasks.iter().find(|task| task.metrics().iter().any(|m| m == metric)).ok_or_else(|| {
            let names = self.metrics();
            let near = config::nearest(metric, names.iter().map(String::as_str));
            let hint = near
                .map_or_else(|| format!("its metrics: {}", names.join(", ")), |name| format!("did you mean `{name}`?"));
            usage(format!("The suite {} has no metric `{metric}`.", self.file)).hint(hint)
        })
    }

    /// The smallest change of `metric` that `replicates` pairs of runs over the items of `subset` can show, at a two-sided `alpha` with
    /// probability `power`, at the worst rate of one half. Only the items' own noise is in it; that between training seeds comes on top,
    /// so an effect below this cannot be seen however alike the seeds are. None for losses, whose spread no rule bounds.
    ///
    /// # Errors
    /// [`Class::Usage`] where there is no such metric, or the subset has too few items.
    pub fn detectable(
        &self,
        metric: &str,
        subset: &Subset,
        replicates: usize,
        alpha: f64,
        power: f64,
    ) -> Result<Option<f64>> {
        let task = self.task_of(metric)?;
        if task.is_likelihood() {
            return Ok(None);
        }
        let n = task.items(subset)?.len() * replicates.max(1);
        stats::detectable_proportion(0.5, n, alpha, power).map(Some)
    }

    /// The train side of the task `name`, or of the only task.
    pub(crate) fn into_training(self, name: Option<&str>) -> Result<Box<dyn Task>> {
        let names = self.tasks.iter().map(|task| task.entry.name.clone()).collect::<Vec<_>>().join(", ");
        let mut tasks = self.tasks;
        let found = match (name, tasks.len()) {
            (None, 1) => tasks.pop(),
            (None, _) => {
                let hint = format!("add `name:` with one of {names}");
                return Err(usage(format!("{} has several tasks.", self.file)).hint(hint));
            }
            (Some(name), _) => tasks.into_iter().find(|task| task.entry.name == name),
        };
        let task = found
            .ok_or_else(|| usage(format!("{} has no such task.", self.file)).hint(format!("its tasks: {names}")))?;
        if task.entry.template.is_some() {
            return Err(usage(format!("The task `{}` has a chat template and cannot be trained on.", task.entry.name))
                .hint("train on a suite whose `prompt` writes the whole text"));
        }
        if task.entry.data.native.is_none() && task.splits().train == 0.0 {
            return Err(usage(format!("The task `{}` has no train split.", task.entry.name))
                .hint("name one in the suite: `splits: {train: 0.8, dev: 0.1, held_out: 0.1}`"));
        }
        Ok(Box::new(task))
    }
}

impl SuiteTask {
    fn new(root: &Path, entry: Entry) -> Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if entry.name.is_empty() || !entry.name.chars().all(plain) {
            return Err(usage(format!("`{}` cannot be a task's name.", entry.name))
                .hint("use letters, digits, `-`, `_` and `.`"));
        }
        check_sampling(&entry.sampling)?;
        if let Some(n) = entry.data.n.filter(|n| *n > MOST_ITEMS) {
            return Err(usage(format!("`n` is {n}, and a task has at most {MOST_ITEMS} items."))
                .hint("lower `n`: some thousands tell small effects; without it, a file gives all its items"));
        }
        let task = open(root, &entry)?;
        let mut templates = Handlebars::new();
        templates.set_strict_mode(true);
        templates.register_escape_fn(handlebars::no_escape);
        if let Some(prompt) = &entry.prompt {
            templates.register_template_string("prompt", prompt).map_err(|e| {
                usage(format!("The prompt is no Handlebars template: {}.", e.reason()))
                    .hint("for example \"{{question}}\\n\"")
            })?;
        }
        let scorer = Scorer::new(entry.scoring())?;
        let mut this = Self { entry, task, scorer, templates, dev: Vec::new(), held_out: Vec::new() };
        this.check_scoring()?;
        this.fill()?;
        Ok(this)
    }

    /// Sorts the items into the splits, and checks that each can be asked and answered.
    fn fill(&mut self) -> Result<()> {
        let splits = self.splits();
        splits.check()?;
        let default = if self.entry.data.native.is_some() { NATIVE_ITEMS } else { usize::MAX };
        for problem in self.task.evaluation(self.entry.data.n.unwrap_or(default))? {
            self.prompt(&problem)?;
            if !self.scorer.admits(&problem.answer) {
                let shown: String = problem.answer.chars().take(60).collect();
                return Err(usage(format!("The answer `{shown}` cannot be scored as {:?}.", self.entry.scoring()))
                    .hint("choose another `scorer`, or another `answer` key"));
            }
            // Without the train share, which the items of the evaluation side have already passed over.
            match splits.of(&problem.id) {
                Split::Dev => self.dev.push(problem),
                _ => self.held_out.push(problem),
            }
        }
        for (split, share, items) in
            [(Split::Dev, splits.dev, &mut self.dev), (Split::HeldOut, splits.held_out, &mut self.held_out)]
        {
            items.sort_by_cached_key(|item| rank("fold", &item.id));
            if share > 0.0 && items.len() < 2 {
                return Err(usage(format!(
                    "The {split} split has {} items, from which no error can be told.",
                    items.len()
                ))
                .hint("raise `n`, or use a larger task or file"));
            }
        }
        Ok(())
    }

    fn check_scoring(&self) -> Result<()> {
        let is_text = self.entry.data.native.as_deref() == Some("text");
        match self.entry.scoring() {
            Scoring::Likelihood if !is_text => {
                Err(usage("Only `native: text` is scored by likelihood.").hint("use `exact` or `numeric`"))
            }
            Scoring::Likelihood if self.entry.prompt.is_some() || self.entry.template.is_some() => {
                Err(usage("A text is scored as it stands, without a prompt.").hint("leave out `prompt` and `template`"))
            }
            Scoring::Likelihood => Ok(()),
            _ if is_text => Err(usage("`native: text` is scored by likelihood alone.").hint("leave out `scorer`")),
            _ => Ok(()),
        }
    }

    fn splits(&self) -> Splits {
        self.entry.splits.unwrap_or(Splits { train: 0.0, dev: 0.5, held_out: 0.5 })
    }

    /// What the suite file says of it.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Hash of the task and its data.
    pub fn data_hash(&self) -> String {
        self.task.hash()
    }

    /// The names of its metrics.
    pub fn metrics(&self) -> Vec<String> {
        let named = |metric: &str| format!("{}/{metric}", self.entry.name);
        if self.is_likelihood() {
            return vec![named("loss"), named("bits_per_byte")];
        }
        let mut names = vec![named("accuracy"), named("pass@1")];
        if self.entry.sampling.k > 1 {
            names.push(named(&format!("pass@{}", self.entry.sampling.k)));
        }
        names
    }

    /// Whether the text itself is scored, and nothing sampled.
    pub(crate) fn is_likelihood(&self) -> bool {
        matches!(self.scorer, Scorer::Likelihood)
    }

    /// The items of `subset`, always in the same order.
    ///
    /// # Errors
    /// [`Class::Usage`] where there are fewer than two.
    pub fn items(&self, subset: &Subset) -> Result<&[Problem]> {
        let items = match subset.split {
            Split::Dev => &self.dev[..],
            Split::HeldOut => &self.held_out[..],
            Split::Train => return Err(usage("The train split is not evaluated on.").hint("use dev or held_out")),
        };
        let part = match subset.fold {
            None => items,
            Some((i, of)) if i < of => &items[items.len() * i / of..items.len() * (i + 1) / of],
            Some((i, of)) => return Err(usage(format!("There is no fold {i} among {of}.")).hint("folds count from 0")),
        };
        if part.len() < 2 {
            let message =
                format!("The task `{}` has {} items in {subset}: no error can be told.", self.entry.name, part.len());
            return Err(usage(message).hint("give the split a share, raise `n`, or use fewer folds"));
        }
        Ok(part)
    }

    /// What the model is given for `problem`, before any chat template.
    ///
    /// # Errors
    /// [`Class::Usage`] where the template names a field that the problem has not.
    pub fn prompt(&self, problem: &Problem) -> Result<String> {
        if self.entry.prompt.is_none() {
            return Ok(problem.prompt.clone());
        }
        self.templates.render("prompt", &problem.fields).map_err(|e| {
            let fields = problem.fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            usage(format!("The prompt cannot be filled in: {}.", e.reason()))
                .hint(format!("the fields of this task: {fields}"))
        })
    }

    /// The score of a completion, 0 to 1.
    pub fn score(&self, problem: &Problem, completion: &str) -> f64 {
        self.scorer.score(&problem.answer, completion).unwrap_or_else(|| self.task.verify(problem, completion))
    }
}

/// As training sees it: the train side, with the suite's prompt and scorer.
impl Task for SuiteTask {
    fn name(&self) -> &str {
        &self.entry.name
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Problem> {
        let problem = self.task.draw(rng)?;
        Ok(Problem { prompt: self.prompt(&problem)?, ..problem })
    }

    fn evaluation(&self, n: usize) -> Result<Vec<Problem>> {
        let items = self.task.evaluation(n)?;
        items.into_iter().map(|problem| Ok(Problem { prompt: self.prompt(&problem)?, ..problem })).collect()
    }

    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        self.score(problem, completion)
    }

    fn hash(&self) -> String {
        digest(&["suite-task", &self.task.hash(), &serde_json::to_string(&self.entry).expect("an entry is JSON")])
    }
}

impl Entry {
    /// The scorer: as written, or the default of its data.
    pub fn scoring(&self) -> &Scoring {
        match &self.scorer {
            Some(scoring) => scoring,
            None if self.data.native.as_deref() == Some("text") => &Scoring::Likelihood,
            None if self.data.native.is_some() => &Scoring::Native,
            None => &Scoring::Exact,
        }
    }
}

/// The task behind an entry.
fn open(root: &Path, entry: &Entry) -> Result<Box<dyn Task>> {
    let data = entry.data.clone();
    match (&data.native, &data.file) {
        (None, None) => {
            Err(usage("The task has no data.").hint("give `data: {native: addition}` or `data: {file: …, sha256: …}`"))
        }
        (None, Some(file)) => {
            if data.digits.is_some() || data.length.is_some() {
                return Err(usage("A file of questions has no `digits` and no `length`.").hint("leave them out"));
            }
            let needed = |key: &str, value: &Option<String>| {
                value.clone().ok_or_else(|| {
                    usage(format!("The data file {file} needs `{key}`.")).hint(match key {
                        "sha256" => format!("add it, so that a changed file is noticed; `sha256sum {file}` prints it"),
                        _ => format!("name the key of the {key} in each row"),
                    })
                })
            };
            let splits = entry.splits.ok_or_else(|| {
                usage("A file of questions needs `splits`.")
                    .hint("for example `splits: {train: 0.8, dev: 0.1, held_out: 0.1}`")
            })?;
            splits.check()?;
            let (sha256, question, answer) =
                (needed("sha256", &data.sha256)?, needed("question", &data.question)?, needed("answer", &data.answer)?);
            Ok(Box::new(JsonLines::open(root, file, &sha256, &question, &answer, &splits)?))
        }
        (Some(native), _) => {
            if !NATIVE_TASKS.contains(&native.as_str()) {
                let hint = format!("native tasks: {}", NATIVE_TASKS.join(", "));
                return Err(usage(format!("There is no native task `{native}`.")).hint(hint));
            }
            if data.question.is_some() || data.answer.is_some() {
                return Err(usage("A native task has no `question` and no `answer`.").hint("leave them out"));
            }
            if entry.splits.is_some_and(|splits| splits.train > 0.0) {
                return Err(
                    usage("A native task has train problems of its own.").hint("leave `train` out of its splits")
                );
            }
            let spec = TaskSpec {
                task: native.clone(),
                digits: data.digits,
                length: data.length,
                file: data.file,
                ..TaskSpec::default()
            };
            if let (Some(sha256), Some(file)) = (&data.sha256, &spec.file) {
                crate::task::check_hash(root, file, sha256)?;
            }
            spec.build(root)
        }
    }
}

fn check_sampling(sampling: &Sampling) -> Result<()> {
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        return Err(
            usage("The sampling temperature must be 0 or more.").hint("0 is greedy, 1 the model's own distribution")
        );
    }
    if sampling.max_tokens == 0 || sampling.k == 0 {
        return Err(usage("The sampling needs `max_tokens` and `k` of 1 or more.")
            .hint("for example `sampling: {max_tokens: 8, k: 1}`"));
    }
    if sampling.k > 1 && sampling.temperature == 0.0 {
        return Err(usage(format!("At temperature 0 all {} samples are the same.", sampling.k))
            .hint("set `temperature`, or `k: 1`"));
    }
    Ok(())
}

/// Where in a suite a task stands. Failures of its data may name other files; of the suite's own text, the task is where to look.
fn place_of(file: &str, text: &str, task: &str) -> String {
    let named = Regex::new(&format!(r#"name:\s*["']?{}(\W|$)"#, regex::escape(task)));
    let line = named.ok().and_then(|named| text.lines().position(|line| named.is_match(line)));
    let line = line.map_or_else(String::new, |line| format!(":{}", line + 1));
    format!("{file}{line}, task `{task}`")
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Class::Usage, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hone_runs::draws;
    use std::collections::HashSet;

    fn suite(text: &str) -> Result<Suite> {
        Suite::parse(Path::new("."), "evals/s.yaml", text)
    }

    fn message(text: &str) -> String {
        suite(text).err().unwrap().to_string()
    }

    const ADD: &str = "tasks:\n- name: add\n  data: {native: addition, digits: 2, n: 400}\n  splits: {dev: 0.5, held_out: 0.5}\n  \
                       prompt: \"{{a}}+{{b}}=\"\n  scorer: exact\n  sampling: {temperature: 0, max_tokens: 8, k: 1}\n";

    #[test]
    fn the_documented_suite_is_read() {
        let suite = suite(ADD).unwrap();
        assert_eq!(suite.metrics(), ["add/accuracy", "add/pass@1"]);
        let task = suite.task_of("add/pass@1").unwrap();
        let (dev, held_out) = (task.items(&Subset::DEV).unwrap(), task.items(&Subset::HELD_OUT).unwrap());
        assert_eq!(dev.len() + held_out.len(), 400);
        assert!(dev.len() > 150 && held_out.len() > 150);
        let item = &dev[0];
        assert_eq!(task.prompt(item).unwrap(), item.prompt);
        assert_eq!((task.score(item, &item.answer), task.score(item, "x")), (1.0, 0.0));
        let n = dev.len() as f64;
        let smallest = suite.detectable("add/pass@1", &Subset::DEV, 3, 0.05, 0.8).unwrap().unwrap();
        assert!((smallest - 2.8016 * (0.5 / (3.0 * n)).sqrt()).abs() < 1e-4);
        let failure = suite.task_of("add/pass@2").err().unwrap();
        assert!(failure.hint.unwrap().contains("add/pass@1"));
    }

    #[test]
    fn folds_are_disjoint_equal_and_complete() {
        let suite = suite(ADD).unwrap();
        let task = &suite.tasks()[0];
        let folds: Vec<_> = (0..7).map(|i| task.items(&Subset::held_out_fold(i, 7)).unwrap()).collect();
        let sizes: HashSet<usize> = folds.iter().map(|fold| fold.len()).collect();
        assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
        let ids: HashSet<&str> = folds.iter().flat_map(|fold| fold.iter().map(|p| p.id.as_str())).collect();
        assert_eq!(ids.len(), task.items(&Subset::HELD_OUT).unwrap().len());
        assert!(task.items(&Subset::held_out_fold(7, 7)).is_err());
        assert!(task.items(&Subset::held_out_fold(0, 400)).is_err(), "a fold without items");
    }

    #[test]
    fn mistakes_are_refused_with_what_to_do() {
        assert!(message(&ADD.replace("scorer", "scorrer")).contains("scorer"));
        assert!(message(&ADD.replace("{{a}}", "{{c}}")).contains("the fields of this task: a, b, prompt, answer"));
        assert!(message(&ADD.replace("{{a}}", "{{a")).contains("no Handlebars template"));
        assert!(message(&ADD.replace("addition", "addi")).contains("native tasks: addition"));
        assert!(message(&ADD.replace("n: 400", "n: 2")).contains("no error can be told"));
        assert!(message(&ADD.replace("n: 400", "n: 10000001")).contains("at most 10000000 items"));
        assert!(message(&ADD.replace("dev: 0.5", "dev: 0.6")).contains("make 1 together"));
        assert!(message(&ADD.replace("dev: 0.5", "train: 0.2, dev: 0.3")).contains("train problems of its own"));
        assert!(message(&ADD.replace("k: 1", "k: 4")).contains("all 4 samples are the same"));
        assert!(message(&ADD.replace("exact", "likelihood")).contains("scored by likelihood"));
        assert!(message(&ADD.replace("digits: 2", "length: 2")).contains("no parameter `length`"));
        assert!(message(&format!("{ADD}{}", ADD.replace("tasks:\n", ""))).contains("Two tasks"));
        assert!(message("tasks: []").contains("no tasks"));
    }

    #[test]
    fn the_hash_is_of_the_content_and_not_of_the_layout() {
        let plain = suite(ADD).unwrap();
        assert_eq!(plain.hash(), suite(&format!("# a comment\n{ADD}")).unwrap().hash());
        assert_ne!(plain.hash(), suite(&ADD.replace("max_tokens: 8", "max_tokens: 9")).unwrap().hash());
    }

    /// A workspace with 200 questions and a suite over them.
    fn workspace(splits: &str) -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let rows: String =
            (0..200).map(|i| format!("{{\"q\": \"What is {i} + 1?\", \"a\": \"so #### {}\"}}\n", i + 1)).collect();
        std::fs::write(dir.path().join("q.jsonl"), &rows).unwrap();
        let sha256 = {
            use sha2::{Digest, Sha256};
            hex::encode(Sha256::digest(&rows))
        };
        let text = format!(
            "tasks:\n- name: q\n  data: {{file: q.jsonl, sha256: {sha256}, question: q, answer: a}}\n  splits: {{{splits}}}\n  \
             prompt: \"Q: {{{{q}}}} <A>\"\n  scorer: numeric\n"
        );
        std::fs::write(dir.path().join("s.yaml"), &text).unwrap();
        (dir, text)
    }

    #[test]
    fn only_the_train_split_of_a_file_is_trained_on() {
        let (dir, _) = workspace("train: 0.6, dev: 0.2, held_out: 0.2");
        let spec = TaskSpec { task: "s.yaml".into(), ..TaskSpec::default() };
        let task = spec.build(dir.path()).unwrap();
        let held: HashSet<String> = task.evaluation(1000).unwrap().into_iter().map(|p| p.id).collect();
        let mut rng = draws(0, "test", 0, 0);
        let drawn: HashSet<String> = (0..2000).map(|_| task.draw(&mut rng).unwrap().id).collect();
        assert!(held.is_disjoint(&drawn));
        assert_eq!(held.len() + drawn.len(), 200);
        let problem = task.draw(&mut rng).unwrap();
        assert!(
            problem.prompt.starts_with("Q: What is ") && problem.prompt.ends_with("<A>"),
            "unescaped: {}",
            problem.prompt
        );
        assert_eq!(task.verify(&problem, &problem.answer), 1.0);
        for split in [Split::Dev, Split::HeldOut] {
            let failure = TaskSpec { split: Some(split), ..spec.clone() }.build(dir.path()).err().unwrap();
            assert!(failure.message.contains("cannot be trained on"), "{failure}");
        }
        assert!(TaskSpec { split: Some(Split::Train), ..spec }.build(dir.path()).is_ok());
    }

    #[test]
    fn a_file_without_a_train_split_cannot_be_trained_on() {
        let (dir, _) = workspace("dev: 0.5, held_out: 0.5");
        let failure = TaskSpec { task: "s.yaml".into(), ..TaskSpec::default() }.build(dir.path()).err().unwrap();
        assert!(failure.message.contains("no train split"));
    }

    #[test]
    fn a_changed_or_unnamed_file_is_refused() {
        let (dir, text) = workspace("dev: 0.5, held_out: 0.5");
        let load = |text: &str| Suite::parse(dir.path(), "s.yaml", text).err().unwrap();
        assert!(load(&text.replace("question: q", "question: z")).message.contains("`z` is missing"));
        let failure = load(
            &text
                .replace("a: a}", "b: a}")
                .replace("answer: a", "answer: q")
                .replace("numeric", "exact")
                .replace("sha256", "sha"),
        );
        assert!(failure.hint.unwrap().contains("sha256"));
        std::fs::write(dir.path().join("q.jsonl"), "{\"q\": \"x\", \"a\": \"1\"}\n").unwrap();
        assert_eq!(load(&text).class, Class::Integrity);
    }

    #[test]
    fn a_text_is_scored_by_its_likelihood() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("t.txt"),
            "abc def\n"
                .repeat(2000)
                .chars()
                .enumerate()
                .map(|(i, c)| if i % 7 == 0 { char::from(b'a' + (i / 7 % 26) as u8) } else { c })
                .collect::<String>(),
        )
        .unwrap();
        let suite = Suite::parse(
            dir.path(),
            "s.yaml",
            "tasks:\n- name: prose\n  data: {native: text, file: t.txt, length: 100}\n",
        )
        .unwrap();
        assert_eq!(suite.metrics(), ["prose/loss", "prose/bits_per_byte"]);
        assert_eq!(suite.detectable("prose/loss", &Subset::DEV, 3, 0.05, 0.8).unwrap(), None);
        let failure = Suite::parse(
            dir.path(),
            "s.yaml",
            "tasks:\n- name: t\n  data: {native: text, file: t.txt}\n  scorer: exact\n",
        )
        .err()
        .unwrap();
        assert!(failure.message.contains("likelihood alone"));
    }
}
