//! What tests train: a task of a few letters and models that fit in a moment.

use crate::{
    config::{ModelConfig, Preset},
    decoder::Decoder,
    learner::Learner,
    recipe::OptimizerSpec,
    tokenizer::Tokenizer,
};
use hone_evals::task::{Problem, Task};
use hone_kernels::threads::Pool;
use hone_runs::Result;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Prompts of two letters of `abcd`, each asking for its first letter; scored by a function of the completion.
pub(crate) struct Letters(pub fn(&Problem, &str) -> f64);

impl Task for Letters {
    fn name(&self) -> &str {
        "letters"
    }
    fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Problem> {
        let mut letter = || char::from(b'a' + rng.random_range(0..4u8));
        let (first, second) = (letter(), letter());
        let prompt = format!("{first}{second}");
        Ok(Problem { id: prompt.clone(), prompt, answer: first.to_string(), fields: Default::default() })
    }
    fn evaluation(&self, _n: usize) -> Result<Vec<Problem>> {
        Ok(Vec::new())
    }
    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        self.0(problem, completion)
    }
    fn hash(&self) -> String {
        "letters".into()
    }
}

/// The alphabet of [`Letters`] and an end.
pub(crate) fn tokenizer() -> Tokenizer {
    Tokenizer::chars(["abcd"]).unwrap()
}

/// One lightning and one softmax layer; `experts` a layer, or a dense feed-forward where 0.
pub(crate) fn config(experts: usize) -> ModelConfig {
    ModelConfig {
        hidden_size: 16,
        layers: 2,
        softmax_every: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 8,
        rotary_dim: 4,
        block: 3,
        intermediate_size: 24,
        experts,
        experts_per_token: experts.min(2),
        ..Preset::HybridTiny.config(tokenizer().vocab_size())
    }
}

/// A fresh learner of [`config`].
pub(crate) fn learner(experts: usize, spec: OptimizerSpec) -> Learner {
    Learner::new(Decoder::new(config(experts), 7).unwrap(), spec)
}

/// Runs `work` on one worker, as training does.
pub(crate) fn pooled<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    Pool::new(1).unwrap().run(work)
}

/// ‖a − b‖ / ‖b‖ over all tensors.
pub(crate) fn distance(a: &crate::decoder::Weights, b: &crate::decoder::Weights) -> f64 {
    let (mut off, mut norm) = (0.0, 0.0);
    for ((_, a), (_, b)) in a.iter().zip(b.iter()) {
        for (&a, &b) in a.data().iter().zip(b.data()) {
            off += f64::from(a - b).powi(2);
            norm += f64::from(b).powi(2);
        }
    }
    (off / norm).sqrt()
}
