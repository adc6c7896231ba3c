//! Training: a recipe's stages in order, to a checkpoint. Steps, budgets, checkpoints, resuming and the files of a run are
//! here; what a step does is its stage's (`sft.rs`, `rl.rs`).
//!
//! A run's folder holds `manifest.json` (what is trained, resolved), `metrics.jsonl` and TensorBoard events, `alarms.jsonl`,
//! `checkpoints/step-N/`, and at the end `result.json`. A run killed at any moment and resumed gives the checkpoint, bit for
//! bit, of the run that was not: every draw is keyed by (seed, purpose, step, index), and a checkpoint holds weights, moments,
//! counters and nothing that depends on the clock.

use crate::{
    alarm::{Alarm, Streaks, Watch},
    budget::{self, Spent},
    checkpoint,
    decoder::Decoder,
    learner::{Learner, Metrics, Step, diverged},
    optimizer::Update,
    recipe::{Recipe, Stage},
    rl,
    sft::{self, Examples},
    tokenizer::Tokenizer,
};
use hone_evals::task::Task;
use hone_kernels::threads::Pool;
use hone_runs::{Class, Failure, MetricsWriter, Result, RunFolder, failure::Context, folder};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Instant,
};

/// What a run is given beside its recipe.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// The run's folder; made where it is missing.
    pub out: PathBuf,
    /// Key of every draw: weights, data, samples.
    pub seed: u64,
    /// Workers; 0 is one a core. Results do not depend on it.
    pub threads: usize,
    /// Go on from the newest checkpoint in `out`, or begin where there is none. A finished run is not run again; another
    /// recipe, seed or data than it was begun with is refused.
    pub resume: bool,
    /// Where the recipe's files are.
    pub workspace_root: PathBuf,
    /// End after so many steps in all, whatever the recipe says.
    pub max_steps: Option<u64>,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            out: PathBuf::from("run"),
            seed: 0,
            threads: 0,
            resume: false,
            workspace_root: PathBuf::from("."),
            max_steps: None,
        }
    }
}

/// Watches a run from outside. Every method has a default that does nothing, and `()` is an observer.
pub trait Observer: Send {
    /// Called after each step.
    fn step(&mut self, _progress: &Progress) {}
    /// Called when a sign has lasted long enough to be an alarm.
    fn alarm(&mut self, _alarm: &Alarm) {}
    /// Asked before each step. With a class (interrupted or terminated) the run saves its state and fails with that class.
    fn stop(&mut self) -> Option<Class> {
        None
    }
}

impl Observer for () {}

/// Where a run stands.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Steps so far, over all stages.
    pub step: u64,
    /// Index of the stage.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// `sft` or `rl`.
    pub kind: &'static str,
    /// Share of the run's compute that is spent.
    pub share: f64,
    /// Rows through the model so far.
    pub tokens: u64,
    /// The step's metrics.
    pub metrics: &'a [(&'a str, f64)],
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stop {
    /// Its compute is spent.
    Budget,
    /// Every stage had all the steps that the recipe allows it.
    Steps,
    /// The caller's `max_steps`.
    MaxSteps,
}

/// What a finished run leaves; also its `result.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainOutcome {
    /// The last checkpoint, relative to the run's folder.
    pub checkpoint: PathBuf,
    /// Hash of its content.
    pub hash: String,
    /// Steps over all stages.
    pub steps: u64,
    /// Rows through the model.
    pub tokens: u64,
    /// Floating-point operations.
    pub flops: f64,
    /// Wall time of the steps, of the last segment where the run was resumed.
    pub seconds: f64,
    /// Why it ended.
    pub stop: Stop,
}

/// What a run is, written before its first step.
#[derive(Serialize)]
struct Manifest<'a> {
    recipe: &'a Recipe,
    seed: u64,
    version: &'static str,
    model: &'a crate::config::ModelConfig,
    parameters: usize,
    tokenizer: serde_json::Value,
    /// Hash of each stage's task.
    tasks: Vec<String>,
    /// Hash of recipe, seed, tasks and the model started from: a resumed run must have the same.
    fingerprint: &'a str,
}

/// All that a checkpoint holds beside weights and moments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct State {
    fingerprint: String,
    /// Steps over all stages.
    step: u64,
    stage: usize,
    stage_step: u64,
    /// Share of the run's compute that was spent when the stage began.
    began: f64,
    /// Next example of a supervised stage.
    position: u64,
    /// Updates since the stage began.
    updates: u64,
    spent: Spent,
    streaks: Streaks,
}

/// The name of the folder of checkpoints in a run's folder.
pub const CHECKPOINTS: &str = "checkpoints";
/// The name of the finished run's record in its folder.
pub const RESULT: &str = "result.json";

/// Trains `recipe` into `options.out`, and returns what came of it.
///
/// # Errors
/// Usage, where recipe and options cannot be used; Candidate, where training diverges (the last good checkpoint stays);
/// Interrupted or Terminated, where the observer asks to stop (state is saved, and a resumed run goes on from it);
/// Infrastructure, where files cannot be written; Integrity, where a checkpoint is not what its hash says.
pub fn train(recipe: &Recipe, options: &TrainOptions, observer: &mut dyn Observer) -> Result<TrainOutcome> {
    recipe.check()?;
    let pool = Pool::new(options.threads).context(Class::Infrastructure, || "Cannot start worker threads".into())?;
    pool.run(|| {
        let folder = RunFolder::open(&options.out)?;
        let checkpoints = RunFolder::open(&options.out.join(CHECKPOINTS))?;
        let lock = checkpoints.try_lock()?.ok_or_else(|| {
            Failure::new(Class::Usage, format!("Another process is training in {}.", options.out.display()))
                .hint("wait for it, or give another --out")
        })?;
        let done = folder::read_json::<TrainOutcome>(&folder.path().join(RESULT))?.filter(|_| options.resume);
        let newest = checkpoint::latest(checkpoints.path());
        if newest.is_some() && !options.resume {
            let message = format!("{} already holds a run.", options.out.display());
            return Err(Failure::new(Class::Usage, message).hint("give --resume to go on with it, or another --out"));
        }
        let tasks =
            recipe.stages.iter().map(|s| s.task().build(&options.workspace_root)).collect::<Result<Vec<_>>>()?;
        let Start { decoder, tokenizer, fingerprint } = Start::new(recipe, options, &tasks)?;
        if let Some(done) = done {
            let begun = folder::read_json::<serde_json::Value>(&folder.manifest())?.unwrap_or_default();
            if let Some(before) = begun["fingerprint"].as_str() {
                check_same(before, &fingerprint, options)?;
            }
            return Ok(done);
        }
        let mut run = Run::open(recipe, options, &tasks, &tokenizer, decoder, fingerprint, folder, newest, lock)?;
        run.finish(observer)
    })
}

/// Refuses to go on with, or to answer for, a run that was begun as another.
fn check_same(before: &str, now: &str, options: &TrainOptions) -> Result<()> {
    if before == now {
        return Ok(());
    }
    let message = format!("{} was begun with another recipe, seed or data.", options.out.display());
    Err(Failure::new(Class::Usage, message)
        .hint("resume with what it was begun with, or start a new run with `model: {from: …}`"))
}

/// The model before the first step.
struct Start {
    decoder: Decoder,
    tokenizer: Tokenizer,
    fingerprint: String,
}

impl Start {
    fn new(recipe: &Recipe, options: &TrainOptions, tasks: &[Box<dyn Task>]) -> Result<Self> {
        let mut hash = Sha256::new();
        hash.update(serde_json::to_vec(recipe).context(Class::Other, || "Cannot encode the recipe".into())?);
        hash.update(options.seed.to_le_bytes());
        tasks.iter().for_each(|task| hash.update(task.hash()));
        let (decoder, tokenizer) = match &recipe.model.from {
            Some(from) => {
                let loaded = checkpoint::load(&checkpoint::find(&options.workspace_root.join(from))?, false)?;
                hash.update(&loaded.hash);
                let tokenizer = recipe.tokenizer(&options.workspace_root, tasks, Some(&loaded.tokenizer))?;
                (loaded.decoder, tokenizer)
            }
            None => {
                let tokenizer = recipe.tokenizer(&options.workspace_root, tasks, None)?;
                (Decoder::new(recipe.model.resolve(tokenizer.vocab_size())?, options.seed)?, tokenizer)
            }
        };
        Ok(Self { decoder, tokenizer, fingerprint: hex::encode(hash.finalize()) })
    }
}

/// A run under way.
struct Run<'a> {
    recipe: &'a Recipe,
    options: &'a TrainOptions,
    tasks: &'a [Box<dyn Task>],
    tokenizer: &'a Tokenizer,
    learner: Learner,
    /// Of the stage that is under way, where it is supervised.
    examples: Option<Examples<'a>>,
    state: State,
    /// Share of the compute at which each stage ends.
    ends: Vec<f64>,
    folder: RunFolder,
    metrics: MetricsWriter,
    watch: Watch,
    /// Step and hash of the newest checkpoint.
    saved: Option<(u64, String)>,
    _lock: File,
}

impl<'a> Run<'a> {
    fn open(
        recipe: &'a Recipe,
        options: &'a TrainOptions,
        tasks: &'a [Box<dyn Task>],
        tokenizer: &'a Tokenizer,
        decoder: Decoder,
        fingerprint: String,
        folder: RunFolder,
        newest: Option<PathBuf>,
        lock: File,
    ) -> Result<Self> {
        let mut state = State {
            fingerprint,
            step: 0,
            stage: 0,
            stage_step: 0,
            began: 0.0,
            position: 0,
            updates: 0,
            spent: Spent::default(),
            streaks: Streaks::default(),
        };
        let mut saved = None;
        let learner = match newest {
            None => {
                let manifest = Manifest {
                    recipe,
                    seed: options.seed,
                    version: env!("CARGO_PKG_VERSION"),
                    model: &decoder.config,
                    parameters: decoder.weights.count(),
                    tokenizer: serde_json::from_str(&tokenizer.to_json()).unwrap_or_default(),
                    tasks: tasks.iter().map(|t| t.hash()).collect(),
                    fingerprint: &state.fingerprint,
                };
                folder::write_json(&folder.manifest(), &manifest)?;
                Learner::new(decoder, recipe.optimizer)
            }
            Some(path) => {
                let loaded = checkpoint::load(&path, true)?;
                let trainer = loaded.trainer.ok_or_else(|| {
                    Failure::new(Class::Usage, format!("{} holds no state to resume from.", path.display()))
                        .hint("start a new run with `model: {from: …}`")
                })?;
                let before: State = serde_json::from_value(trainer.state)
                    .context(Class::Usage, || format!("Cannot resume from {}", path.display()))?;
                check_same(&before.fingerprint, &state.fingerprint, options)?;
                state = before;
                saved = Some((state.step, loaded.hash));
                let mut learner = Learner::new(loaded.decoder, recipe.optimizer);
                learner.optimizer.first = trainer.m;
                learner.optimizer.second = trainer.v;
                learner.optimizer.updates = state.updates;
                learner.spent = state.spent;
                learner
            }
        };
        let metrics = match &saved {
            None => MetricsWriter::create(folder.path())?,
            Some((step, _)) => MetricsWriter::resume(folder.path(), *step)?,
        };
        let watch = Watch::open(folder.path(), state.step)?;
        let ends = budget::ends(&recipe.stages.iter().map(|s| s.common().share).collect::<Vec<_>>());
        let examples = None;
        Ok(Self {
            recipe,
            options,
            tasks,
            tokenizer,
            learner,
            examples,
            state,
            ends,
            folder,
            metrics,
            watch,
            saved,
            _lock: lock,
        })
    }

    fn finish(&mut self, observer: &mut dyn Observer) -> Result<TrainOutcome> {
        let recipe = self.recipe;
        let stop = loop {
            let Some(stage) = recipe.stages.get(self.state.stage) else { break Stop::Steps };
            let share = self.learner.spent.share(&recipe.compute);
            if share >= 1.0 {
                break Stop::Budget;
            }
            let common = stage.common();
            if share >= self.ends[self.state.stage] || common.steps.is_some_and(|most| self.state.stage_step >= most) {
                self.next_stage(share);
                continue;
            }
            if self.options.max_steps.is_some_and(|most| self.state.step >= most) {
                break Stop::MaxSteps;
            }
            if let Some(class) = observer.stop() {
                self.save()?;
                let message = format!("Stopped after step {}; the state is saved.", self.state.step);
                return Err(Failure::new(class, message).hint("go on with --resume"));
            }
            self.step(stage, share, observer).map_err(|failure| self.placed(failure))?;
            if self.state.step.is_multiple_of(recipe.checkpoints.every) {
                self.save()?;
            }
        };
        let hash = self.save()?;
        self.metrics.flush();
        let Spent { tokens, flops, seconds } = self.learner.spent;
        let steps = self.state.step;
        let checkpoint = Path::new(CHECKPOINTS).join(format!("step-{steps}"));
        let outcome = TrainOutcome { checkpoint, hash, steps, tokens, flops, seconds, stop };
        folder::write_json(&self.folder.path().join(RESULT), &outcome)?;
        Ok(outcome)
    }

    /// A stage starts with fresh moments, since its loss is another.
    fn next_stage(&mut self, share: f64) {
        self.state = State {
            fingerprint: std::mem::take(&mut self.state.fingerprint),
            step: self.state.step,
            stage: self.state.stage + 1,
            stage_step: 0,
            began: share,
            position: 0,
            updates: 0,
            spent: self.state.spent,
            streaks: Streaks::default(),
        };
        self.examples = None;
        self.learner.reset_optimizer();
    }

    fn step(&mut self, stage: &Stage, share: f64, observer: &mut dyn Observer) -> Result<()> {
        let clock = Instant::now();
        let before = self.learner.spent;
        let common = stage.common();
        let lr = stage.lr(&self.recipe.optimizer);
        let end = self.ends[self.state.stage];
        let by_steps = common.steps.map_or(0.0, |most| self.state.stage_step as f64 / most as f64);
        let progress = ((share - self.state.began) / (end - self.state.began)).max(by_steps);

        let (index, task) = (self.state.stage as u64, self.tasks[self.state.stage].as_ref());
        let (done, mut metrics) = match stage {
            Stage::Sft(spec) => {
                let (tokenizer, seed) = (self.tokenizer, self.options.seed);
                let examples = self.examples.get_or_insert_with(|| Examples::new(spec, index, task, tokenizer, seed));
                let (after, done, metrics) =
                    sft::step(spec, examples, self.state.position, lr, progress, &mut self.learner)?;
                self.state.position = after;
                (Some(done), metrics)
            }
            Stage::Rl(spec) => {
                let source = rl::Source { task, tokenizer: self.tokenizer, seed: self.options.seed, stage: index };
                rl::step(spec, source, self.state.stage_step, lr, progress, &mut self.learner)?
            }
        };
        self.state.step += 1;
        self.state.stage_step += 1;

        let seconds = clock.elapsed().as_secs_f64();
        self.learner.spent.seconds += seconds;
        let spent = self.learner.spent;
        if let Some(done) = done {
            metrics.extend(done.metrics());
        }
        let share = spent.share(&self.recipe.compute);
        metrics.extend([
            ("train/stage", self.state.stage as f64),
            ("train/tokens", spent.tokens as f64),
            ("train/flops", spent.flops),
            ("train/share", share),
            ("train/tokens_per_second", (spent.tokens - before.tokens) as f64 / seconds.max(1e-9)),
        ]);
        self.metrics.log(self.state.step, &metrics);
        for alarm in self.watch.look(self.state.step, &metrics, &mut self.state.streaks)? {
            observer.alarm(&alarm);
        }
        observer.step(&Progress {
            step: self.state.step,
            stage: self.state.stage,
            stages: self.recipe.stages.len(),
            kind: stage.kind(),
            share,
            tokens: spent.tokens,
            metrics: &metrics,
        });
        Ok(())
    }

    /// Writes the checkpoint of this step, unless it is there, and returns its hash. The newest `keep` stay.
    fn save(&mut self) -> Result<String> {
        if let Some((step, hash)) = &self.saved
            && *step == self.state.step
        {
            return Ok(hash.clone());
        }
        if self.learner.decoder.weights.has_non_finite() {
            return Err(self.placed(diverged("a weight is not finite")));
        }
        self.state.updates = self.learner.optimizer.updates;
        self.state.spent = self.learner.spent;
        if self.recipe.compute.seconds.is_none() {
            self.state.spent.seconds = 0.0;
        }
        let state = serde_json::to_value(&self.state).context(Class::Other, || "Cannot encode the state".into())?;
        let Learner { decoder, optimizer, .. } = &self.learner;
        let all = self.folder.path().join(CHECKPOINTS);
        let moments = Some((&state, &optimizer.first, &optimizer.second));
        let hash = checkpoint::save(&all.join(format!("step-{}", self.state.step)), decoder, self.tokenizer, moments)?;
        self.metrics.flush();
        self.saved = Some((self.state.step, hash.clone()));
        prune(&all, self.recipe.checkpoints.keep)?;
        Ok(hash)
    }

    /// Says of a diverged run where it happened, and what is left of it.
    fn placed(&self, mut failure: Failure) -> Failure {
        if failure.class == Class::Candidate {
            let kind = self.recipe.stages.get(self.state.stage).map_or("", Stage::kind);
            let sentence = failure.message.trim_end_matches('.');
            failure.message = format!("{sentence} (step {}, stage {}, {kind}).", self.state.step + 1, self.state.stage);
            let kept = match &self.saved {
                Some((step, _)) => format!("the last good checkpoint is step-{step}"),
                None => "no checkpoint had been written yet".into(),
            };
            failure.hint = Some(failure.hint.map_or(kept.clone(), |hint| format!("{hint}; {kept}")));
        }
        failure
    }
}

impl Step {
    fn metrics(&self) -> Metrics {
        let Update { norm, scale, under_eps, cosine } = self.update;
        let mut metrics = vec![
            ("train/lr", self.lr),
            ("train/grad_norm", norm),
            ("train/grad_scale", scale),
            ("train/grad_under_eps", under_eps),
            ("train/grad_cosine", cosine),
        ];
        let named = [
            ("train/balance_loss", self.balance),
            ("train/expert_max_load", self.max_load),
            ("train/expert_min_load", self.min_load),
        ];
        metrics.extend(named.into_iter().filter_map(|(name, value)| Some((name, value?))));
        metrics
    }
}

/// Removes all but the newest `keep` checkpoints: each is moved aside first, so that none is ever seen in part.
fn prune(checkpoints: &Path, keep: usize) -> Result<()> {
    let cannot = || format!("Cannot remove old checkpoints in {}", checkpoints.display());
    let mut steps = Vec::new();
    for entry in std::fs::read_dir(checkpoints).context(Class::Infrastructure, cannot)? {
        let name = entry.context(Class::Infrastructure, cannot)?.file_name();
        let Some(name) = name.to_str() else { continue };
        if name.starts_with("removed-") {
            std::fs::remove_dir_all(checkpoints.join(name)).context(Class::Infrastructure, cannot)?;
        }
        steps.extend(name.strip_prefix("step-").and_then(|n| n.parse::<u64>().ok()));
    }
    steps.sort_unstable();
    steps.truncate(steps.len().saturating_sub(keep));
    for step in steps {
        let aside = checkpoints.join(format!("removed-{step}"));
        std::fs::rename(checkpoints.join(format!("step-{step}")), &aside)
            .and_then(|()| std::fs::remove_dir_all(&aside))
            .context(Class::Infrastructure, cannot)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
