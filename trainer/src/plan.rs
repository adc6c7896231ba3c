//! What a recipe needs before anything is spent: memory by part and stage, parameters, compute, disk. Time is not reckoned but
//! measured, on real steps of each stage ([`measure`]), and only where those are short.

use std::path::Path;
use std::time::Instant;

use hone_kernels::threads::Pool;
use hone_runs::failure::Context;
use hone_runs::{Class, Failure, Result};
use serde::Serialize;

use crate::checkpoint;
use crate::decoder::Decoder;
use crate::learner::Learner;
use crate::memory::{Load, Memory, Sampling};
use crate::recipe::{Named, Recipe, Rl, Sft, Spending, Stage, params, spending};
use crate::rl;
use crate::sft::{self, Examples};

/// What a recipe needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Weights of the model.
    pub params: u64,
    /// Weights that one token is multiplied with.
    pub active: u64,
    /// The stages, in order.
    pub stages: Vec<StagePlan>,
    /// Of the whole run: part by part the most that a stage needs.
    pub memory: Memory,
    /// Its sum.
    pub memory_total: u64,
    /// Bytes of a checkpoint: weights and two moments.
    pub checkpoint: u64,
    /// Bytes of all checkpoints that stand at one time: those kept and the one being written.
    pub disk: u64,
    /// Seconds after which the recipe ends the run, where it says so.
    pub seconds: Option<f64>,
}

/// What a stage needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StagePlan {
    /// `sft` or `rl`.
    pub kind: &'static str,
    /// The most that it has at once.
    pub load: Load,
    /// Its memory.
    pub memory: Memory,
    /// What it will spend; None where only time is limited.
    pub spending: Option<Spending>,
    /// Its most steps, where the recipe says so.
    pub steps: Option<u64>,
}

/// A step of a stage, timed on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Rows through the model.
    pub tokens: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Problems that are drawn to see how long a task's texts are.
const LOOKED_AT: u64 = 256;

/// Rows times weights past which nothing fits anywhere, and sums of bytes would pass the integers.
const MOST: f64 = 1e16;

/// What `recipe` needs on `threads` workers; `root` is where its files are.
///
/// # Errors
/// Usage, where the recipe or what it names cannot be used, or its batches are absurdly large.
pub fn plan(recipe: &Recipe, root: &Path, threads: usize) -> Result<Plan> {
    let named = Named::of(recipe, root)?;
    let config = &named.config;
    let (params, mut stages) = (params(config), Vec::new());
    for (i, (stage, spending)) in recipe.stages.iter().zip(spending(recipe, config)).enumerate() {
        let load = match stage {
            Stage::Sft(spec) => supervised(spec, longest(&named, i, stage)?),
            Stage::Rl(spec) => reinforced(spec, longest(&named, i, stage)?),
        };
        let load = load.filter(|load| (load.step_rows as f64) * (params as f64) < MOST).ok_or_else(|| {
            let message = format!("stages.{i}.{}: a step has more rows than any machine holds.", stage.kind());
            Failure::new(Class::Usage, message).hint("lower its batch: it is counted in tokens")
        })?;
        let memory = Memory::plan(config, &load, threads, recipe.optimizer.balance > 0.0);
        stages.push(StagePlan { kind: stage.kind(), load, memory, spending, steps: stage.common().steps });
    }
    let memory = stages.iter().map(|s| s.memory).fold(Memory::default(), Memory::or_larger);
    let checkpoint = memory.weights + memory.moments;
    Ok(Plan {
        params,
        active: config.active_matmul_weights(),
        memory_total: memory.total(),
        memory,
        checkpoint,
        disk: checkpoint.saturating_mul(recipe.checkpoints.keep as u64 + 1),
        seconds: recipe.compute.seconds.map(|s| s.as_seconds()),
        stages,
    })
}

impl Plan {
    /// Rows through the model and floating-point operations of all stages; None where only time is limited.
    pub fn spending(&self) -> Option<Spending> {
        let add = |a: Spending, b: Spending| Spending { tokens: a.tokens + b.tokens, flops: a.flops + b.flops };
        self.stages.iter().map(|s| s.spending).reduce(|a, b| Some(add(a?, b?)))?
    }

    /// Seconds that the run takes if every step is as long as the one of its stage in `measured`.
    pub fn time(&self, measured: &[Measured]) -> Option<f64> {
        let of = |(stage, step): (&StagePlan, &Measured)| {
            let most = |steps: u64| steps as f64 * step.seconds;
            let spent = stage.spending.map(|s| s.tokens / step.tokens.max(1) as f64 * step.seconds);
            [spent, stage.steps.map(most)].into_iter().flatten().reduce(f64::min)
        };
        let steps = self.stages.iter().zip(measured).map(of).reduce(|a, b| Some(a? + b?)).flatten();
        [steps, self.seconds].into_iter().flatten().reduce(f64::min)
    }

    /// What to lower where the memory does not suffice: keys of the recipe that the largest part follows.
    pub fn remedy(&self) -> &'static str {
        let Memory { weights, gradients, moments, checkpoint, rollout, data, .. } = self.memory;
        let model = weights + gradients + moments + checkpoint;
        let rows = self.memory_total - model - rollout - data;
        let divisible =
            self.stages.iter().max_by_key(|s| s.memory.total()).is_some_and(|s| s.load.rows > s.load.tree_rows);
        if model >= rows.max(rollout).max(data) {
            "lower `hidden_size`, `intermediate_size`, `experts` or `layers` of `model`"
        } else if rows >= rollout.max(data) && divisible {
            "lower `micro_batch` of the stage: the result is the same but for rounding"
        } else {
            "lower `prompts`, `group` or `max_tokens` of the stage, or the length of its texts"
        }
    }
}

/// Tokens of the longest of some texts of stage `index`: whole examples, or prompts where completions are sampled.
fn longest(named: &Named, index: usize, stage: &Stage) -> Result<usize> {
    let task = named.tasks[index].as_ref();
    match stage {
        Stage::Sft(spec) => {
            let mut examples = Examples::new(spec, index as u64, task, &named.tokenizer, 0);
            (0..LOOKED_AT).try_fold(0, |most, i| Ok(most.max(examples.at(i)?.tokens.len())))
        }
        Stage::Rl(_) => rl::longest_prompt(task, &named.tokenizer, LOOKED_AT),
    }
}

/// None where numbers are too large to multiply.
fn supervised(spec: &Sft, longest: usize) -> Option<Load> {
    // The last token of an example has no row; an example longer than a batch is one of its own.
    let longest = longest - 1;
    let rows = spec.batch.min(spec.micro_batch).max(longest);
    let step_rows = spec.batch.max(longest);
    Some(Load { rows, predictions: rows, step_rows, tree_rows: longest, branching: 0, sampling: None })
}

/// As [`supervised`]. Groups are never divided between passes.
fn reinforced(spec: &Rl, prompt: usize) -> Option<Load> {
    let tree = spec.group.checked_mul(spec.max_tokens - 1)?.checked_add(prompt)?;
    let step_rows = tree.checked_mul(spec.prompts)?;
    let minibatch = spec.prompts.div_ceil(spec.minibatches);
    let groups = (spec.micro_batch / tree).clamp(1, minibatch);
    Some(Load {
        rows: groups * tree,
        predictions: groups * spec.group * spec.max_tokens,
        step_rows,
        tree_rows: tree,
        branching: groups,
        sampling: Some(Sampling { prompts: spec.prompts, group: spec.group, prompt, completion: spec.max_tokens }),
    })
}

/// Weights past which even a fresh model takes long to make.
const MOST_WEIGHTS: u64 = 200_000_000;

/// Operations of the steps timed, at most: a second or so on two cores.
const MOST_FLOPS: f64 = 6e10;

/// Times a step of each stage of `recipe` as `plan` has it, on `threads` workers (0: one a core), after one that is not counted.
/// None where that would take more than a few seconds. Groups without a signal are trained as well, so that an untrained model's
/// step is a whole one.
///
/// # Errors
/// As [`plan`]; Infrastructure, where there are no threads.
pub fn measure(recipe: &Recipe, root: &Path, plan: &Plan, threads: usize) -> Result<Option<Vec<Measured>>> {
    if plan.params > MOST_WEIGHTS {
        return Ok(None);
    }
    let named = Named::of(recipe, root)?;
    let pool = Pool::new(threads).context(Class::Infrastructure, || "Cannot start worker threads".into())?;
    pool.run(|| {
        let dearest = |s: &StagePlan| named.config.train_flops(s.load.step_rows as u64, s.load.tree_rows as f64);
        if plan.stages.iter().map(dearest).sum::<f64>() > MOST_FLOPS {
            return Ok(None);
        }
        let decoder = match &recipe.model.from {
            Some(from) => checkpoint::load(&checkpoint::find(&root.join(from))?, false)?.decoder,
            None => Decoder::new(named.config.clone(), 0)?,
        };
        let mut learner = Learner::new(decoder, recipe.optimizer);
        let mut all = Vec::new();
        for (i, stage) in recipe.stages.iter().enumerate() {
            all.push(step(&named, i, stage, &mut learner)?);
        }
        Ok(Some(all))
    })
}

/// Two steps of a stage, the second timed. Their learning rate is 0: the model stays what it is.
fn step(named: &Named, index: usize, stage: &Stage, learner: &mut Learner) -> Result<Measured> {
    let (task, tokenizer, of) = (named.tasks[index].as_ref(), &named.tokenizer, index as u64);
    let mut position = 0;
    let mut timed = |number: u64| {
        let (clock, before) = (Instant::now(), learner.spent.tokens);
        match stage {
            Stage::Sft(spec) => {
                let mut examples = Examples::new(spec, of, task, tokenizer, 0);
                position = sft::step(spec, &mut examples, position, 0.0, 0.0, learner)?.0;
            }
            Stage::Rl(spec) => {
                let spec = Rl { dynamic_sampling: false, ..spec.clone() };
                let source = rl::Source { task, tokenizer, seed: 0, stage: of };
                rl::step(&spec, source, number, 0.0, 0.0, learner)?;
            }
        }
        Ok(Measured { tokens: learner.spent.tokens - before, seconds: clock.elapsed().as_secs_f64() })
    };
    timed(0)?;
    timed(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Plan> {
        plan(&Recipe::parse(text, "recipe.yaml", &[]).unwrap(), Path::new("."), 1)
    }

    #[test]
    fn a_pass_has_no_more_rows_than_the_recipe_says() {
        let rows = |stage: &str| {
            let load = of(&format!("model: {{preset: hybrid-nano}}\nstages: [{stage}]\n")).unwrap().stages[0].load;
            (load.rows, load.step_rows)
        };
        assert_eq!(rows("sft: {batch: 300}"), (300, 300));
        assert_eq!(rows("sft: {batch: 300, micro_batch: 100}"), (100, 300));
        // An example of 1 + 50 + 50 + 1 tokens, whatever the batch.
        assert_eq!(rows("sft: {task: reverse, length: 50, batch: 10}"), (101, 101));
        // A prompt of `abc=` and four completions of which the last token has no row.
        let rl =
            |more: &str| rows(&format!("rl: {{task: reverse, length: 3, prompts: 6, group: 4, max_tokens: 9{more}}}"));
        assert_eq!(rl(""), (6 * 36, 6 * 36));
        assert_eq!(rl(", micro_batch: 80"), (2 * 36, 6 * 36));
        assert_eq!(rl(", micro_batch: 1"), (36, 6 * 36));
        assert_eq!(rl(", minibatches: 2"), (3 * 36, 6 * 36));
    }

    #[test]
    fn absurd_batches_are_refused_and_the_largest_part_is_named() {
        for stage in ["sft: {batch: 9000000000000000000}", "rl: {prompts: 4000000000, group: 4000000000}"] {
            let failure = of(&format!("stages: [{stage}]\n")).unwrap_err();
            assert!(failure.class == Class::Usage && failure.message.contains("more rows"), "{failure}");
        }
        let remedy = |text: &str| of(text).unwrap().remedy();
        assert!(remedy("model: {hidden_size: 4096}\n").contains("hidden_size"));
        assert!(
            remedy("stages: [sft: {batch: 100k, micro_batch: 100000}]\n".replace("100k", "100000").as_str())
                .contains("micro_batch")
        );
        let many =
            "model: {preset: hybrid-nano}\nstages: [rl: {prompts: 64, group: 64, max_tokens: 512, micro_batch: 1}]\n";
        assert!(remedy(many).contains("max_tokens"));
    }

    #[test]
    fn a_step_of_every_stage_is_timed() {
        let text =
            "model: {preset: hybrid-nano}\nstages: [sft: {batch: 64}, rl: {prompts: 2, group: 2, max_tokens: 3}]\n";
        let recipe = Recipe::parse(text, "recipe.yaml", &[]).unwrap();
        let plan = plan(&recipe, Path::new("."), 1).unwrap();
        let measured = measure(&recipe, Path::new("."), &plan, 1).unwrap().expect("these are short");
        assert_eq!(measured.len(), 2);
        for (measured, stage) in measured.iter().zip(&plan.stages) {
            assert!(measured.seconds > 0.0 && measured.tokens > 0, "{measured:?} of {stage:?}");
        }
        // A million tokens, half a stage.
        let time = plan.time(&[Measured { tokens: 100, seconds: 1.0 }, Measured { tokens: 50, seconds: 2.0 }]);
        assert_eq!(time, Some(5000.0 + 20_000.0));
        let large = Plan { params: MOST_WEIGHTS + 1, ..plan };
        assert_eq!(measure(&recipe, Path::new("."), &large, 1).unwrap(), None);
    }
}
