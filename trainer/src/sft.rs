//! The supervised stage: examples drawn from a task, packed to a number of rows a step, next-token loss on the answers.

use crate::{
    data::{Batch, Packer},
    learner::{Learner, Step, diverged},
    recipe::{Sft, Trained},
    tokenizer::Tokenizer,
};
use hone_evals::task::Task;
use hone_runs::{Class, Failure, Result, draws};
use rand::seq::SliceRandom;

/// A sequence and the index of its first trained token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Example {
    pub tokens: Vec<u32>,
    pub trained_from: usize,
}

/// The stage's examples by position: a function of seed and position alone, so the position is all that a resumed run needs.
pub(crate) struct Examples<'a> {
    task: &'a dyn Task,
    tokenizer: &'a Tokenizer,
    trained: Trained,
    seed: u64,
    stage: u64,
    /// Distinct examples; None for a fresh one at every position.
    bound: Option<u64>,
    /// The order of the epoch last asked for.
    order: (u64, Vec<u64>),
}

impl<'a> Examples<'a> {
    pub fn new(spec: &Sft, stage: u64, task: &'a dyn Task, tokenizer: &'a Tokenizer, seed: u64) -> Self {
        let bound = spec.examples.map(|n| n.0);
        Self { task, tokenizer, trained: spec.loss, seed, stage, bound, order: (u64::MAX, Vec::new()) }
    }

    /// The example at `position`, counted over all epochs.
    ///
    /// # Errors
    /// Where the task has no problem, the tokenizer cannot encode it, or no token of it is trained.
    pub fn at(&mut self, position: u64) -> Result<Example> {
        let index = match self.bound {
            None => position,
            Some(n) => {
                let epoch = position / n;
                if self.order.0 != epoch {
                    let mut order: Vec<u64> = (0..n).collect();
                    order.shuffle(&mut draws(self.seed, "sft order", self.stage, epoch));
                    self.order = (epoch, order);
                }
                self.order.1[(position % n) as usize]
            }
        };
        let problem = self.task.draw(&mut draws(self.seed, "sft example", self.stage, index))?;
        let mut tokens = self.tokenizer.encode(&problem.prompt)?;
        let trained_from = if self.trained == Trained::All { 0 } else { tokens.len() };
        tokens.extend(self.tokenizer.encode(&problem.answer)?);
        // A passage without a prompt is cut from a text and does not end where it ends.
        if !problem.prompt.is_empty() {
            tokens.push(self.tokenizer.end());
        }
        if tokens.len() < 2 {
            return Err(Failure::new(
                Class::Usage,
                format!("An example of the task `{}` trains on no token.", self.task.name()),
            )
            .hint("an example needs at least two tokens: give the task longer texts"));
        }
        Ok(Example { tokens, trained_from })
    }
}

/// One step: the examples from `position` on, one update. Returns the position after them, and the step's metrics.
pub(crate) fn step(
    spec: &Sft,
    examples: &mut Examples,
    position: u64,
    highest_lr: f64,
    progress: f64,
    learner: &mut Learner,
) -> Result<(u64, Step, Vec<(&'static str, f64)>)> {
    let (batches, after) = assemble(spec, examples, position)?;
    let terms: usize = batches.iter().map(|b| b.terms.len()).sum();
    let rows: usize = batches.iter().map(|b| b.forest.rows()).sum();
    let weight = 1.0 / terms as f32;
    let (mut logprob, mut entropy, mut gradient) = (Vec::new(), Vec::new(), Vec::new());
    let (mut loss, mut entropies) = (0.0, 0.0);
    for batch in &batches {
        learner.score(batch, 1.0, &mut logprob, &mut entropy);
        loss -= logprob.iter().map(|&l| f64::from(l)).sum::<f64>();
        entropies += entropy.iter().map(|&e| f64::from(e)).sum::<f64>();
        gradient.clear();
        gradient.resize(batch.terms.len(), -weight);
        learner.backward(batch, 1.0, &gradient, batch.forest.rows() as f64 / rows as f64);
    }
    let loss = loss / terms as f64;
    if !loss.is_finite() {
        return Err(diverged("the loss is not finite"));
    }
    let done = learner.update(highest_lr, progress)?;
    let mut metrics = vec![
        ("train/loss", loss),
        ("sft/entropy", entropies / terms as f64),
        ("sft/terms", terms as f64),
        ("sft/rows", rows as f64),
    ];
    if let Some(n) = spec.examples {
        metrics.push(("sft/epoch", after as f64 / n.0 as f64));
    }
    Ok((after, done, metrics))
}

/// Packs examples from `position` until the next would pass `spec.batch` rows, into batches of at most `spec.micro_batch`.
fn assemble(spec: &Sft, examples: &mut Examples, mut position: u64) -> Result<(Vec<Batch>, u64)> {
    let (mut packer, mut batches, mut rows) = (Packer::default(), Vec::new(), 0);
    loop {
        let example = examples.at(position)?;
        let more = example.tokens.len() - 1;
        if rows > 0 && rows + more > spec.batch {
            break;
        }
        if packer.rows() > 0 && packer.rows() + more > spec.micro_batch {
            batches.push(packer.finish());
        }
        packer.add(&example.tokens, example.trained_from);
        rows += more;
        position += 1;
    }
    batches.push(packer.finish());
    Ok((batches, position))
}
