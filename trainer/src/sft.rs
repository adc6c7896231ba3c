//! The supervised stage: examples drawn from a task, packed to a number of rows a step, next-token loss on the answers.

use crate::{
    data::{Batch, Packer},
    learner::{Learner, Metrics, Step, diverged},
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
) -> Result<(u64, Step, Metrics)> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        recipe::{OptimizerSpec, Schedule},
        toy::{self, Letters},
    };
    use hone_evals::task::Problem;
    use hone_runs::Count;
    use rand_chacha::ChaCha8Rng;

    const TASK: Letters = Letters(|_, _| 0.0);

    fn flat() -> OptimizerSpec {
        OptimizerSpec { lr: 1e-2, warmup: 0, schedule: Schedule::Constant, ..OptimizerSpec::default() }
    }

    /// A task of one fixed problem.
    struct Fixed(&'static str, &'static str);

    impl Task for Fixed {
        fn name(&self) -> &str {
            "fixed"
        }
        fn draw(&self, _rng: &mut ChaCha8Rng) -> Result<Problem> {
            Ok(Problem { id: String::new(), prompt: self.0.into(), answer: self.1.into(), fields: Default::default() })
        }
        fn evaluation(&self, _n: usize) -> Result<Vec<Problem>> {
            Ok(Vec::new())
        }
        fn verify(&self, _problem: &Problem, _completion: &str) -> f64 {
            0.0
        }
        fn hash(&self) -> String {
            String::new()
        }
    }

    fn example(trained: Trained, task: &dyn Task) -> Result<Example> {
        let (spec, tokenizer) = (Sft { loss: trained, ..Sft::default() }, toy::tokenizer());
        Examples::new(&spec, 0, task, &tokenizer, 1).at(0)
    }

    #[test]
    fn the_answer_and_its_end_are_trained() {
        let end = toy::tokenizer().end();
        let answer = example(Trained::Answer, &Fixed("ab", "cd")).unwrap();
        assert_eq!(answer, Example { tokens: vec![0, 1, 2, 3, end], trained_from: 2 });
        assert_eq!(example(Trained::All, &Fixed("ab", "cd")).unwrap().trained_from, 0);
    }

    #[test]
    fn a_passage_is_trained_whole_and_has_no_end() {
        let passage = example(Trained::Answer, &Fixed("", "abc")).unwrap();
        assert_eq!(passage, Example { tokens: vec![0, 1, 2], trained_from: 0 });
    }

    #[test]
    fn an_example_that_trains_nothing_is_an_error() {
        for task in [Fixed("", ""), Fixed("", "a")] {
            assert_eq!(example(Trained::Answer, &task).unwrap_err().class, Class::Usage);
        }
        assert!(example(Trained::Answer, &Fixed("ab", "z")).unwrap_err().message.contains("'z'"));
    }

    #[test]
    fn an_epoch_passes_over_every_example_once_in_a_new_order() {
        let (spec, tokenizer) = (Sft { examples: Some(Count(9)), ..Sft::default() }, toy::tokenizer());
        let mut examples = Examples::new(&spec, 0, &TASK, &tokenizer, 5);
        let epochs: Vec<Vec<Vec<u32>>> =
            (0..3).map(|e| (0..9).map(|i| examples.at(9 * e + i).unwrap().tokens).collect()).collect();
        let sorted = |e: &Vec<Vec<u32>>| {
            let mut e = e.clone();
            e.sort();
            e
        };
        assert_eq!(sorted(&epochs[0]), sorted(&epochs[1]));
        assert_ne!(epochs[0], epochs[1]);
        // A position alone says which example: asked anew, out of order, it is the same.
        assert_eq!(Examples::new(&spec, 0, &TASK, &tokenizer, 5).at(20).unwrap().tokens, epochs[2][2]);
        assert_ne!(
            (0..9).map(|i| Examples::new(&spec, 1, &TASK, &tokenizer, 5).at(i).unwrap().tokens).collect::<Vec<_>>(),
            epochs[0]
        );
    }

    fn steps(spec: &Sft, experts: usize, count: usize) -> (Learner, Vec<f64>) {
        toy::pooled(|| {
            let tokenizer = toy::tokenizer();
            let mut examples = Examples::new(spec, 0, &TASK, &tokenizer, 5);
            let (mut learner, mut position, mut losses) = (toy::learner(experts, flat()), 0, Vec::new());
            for _ in 0..count {
                let (after, _, metrics) = step(spec, &mut examples, position, 1e-2, 0.0, &mut learner).unwrap();
                position = after;
                losses.push(metrics[0].1);
            }
            (learner, losses)
        })
    }

    #[test]
    fn loss_falls() {
        let (_, losses) = steps(&Sft { batch: 64, ..Sft::default() }, 2, 60);
        let late = losses[50..].iter().sum::<f64>() / 10.0;
        assert!(losses[0] > 1.5 && late < 0.7, "{losses:?}");
    }

    #[test]
    fn the_gradient_does_not_depend_on_the_split_into_passes() {
        // Token-weighted: passes of 1, of a few, and of all rows give one mean over tokens, never a mean of means.
        let at = |micro_batch| steps(&Sft { batch: 60, micro_batch, loss: Trained::All, ..Sft::default() }, 0, 1);
        let (whole, loss) = at(1000);
        for micro in [1, 7, 20] {
            let (split, split_loss) = at(micro);
            assert!((split_loss[0] - loss[0]).abs() < 1e-6);
            let off = toy::distance(&split.optimizer.first, &whole.optimizer.first);
            assert!(off < 1e-5, "passes of {micro}: {off}");
        }
    }

    #[test]
    fn every_weight_gets_a_gradient() {
        let (learner, _) = steps(&Sft { batch: 200, loss: Trained::All, ..Sft::default() }, 2, 1);
        for (name, first) in learner.optimizer.first.iter() {
            assert!(first.data().iter().any(|&m| m != 0.0), "{name} got none");
        }
    }
}
