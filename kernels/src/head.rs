//! Log-probs of predictions straight from hidden states and head: no `[T, V]` array ever exists; the vocabulary passes in tiles.

use crate::{Prediction, Tensor};

/// What [`forward`] finds, one entry a prediction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Natural log-prob of the target at the given temperature.
    pub logprob: Vec<f32>,
    /// Entropy of the row's distribution, nats.
    pub entropy: Vec<f32>,
    /// Log of the softmax's denominator over logits / temperature, maximum added back: kept for backward.
    pub lse: Vec<f32>,
}

/// Scores `predictions` (sorted by row) of `hidden[T, H]` under `head[H, V]`; logits are divided by `temperature` > 0.
pub fn forward(hidden: &Tensor, head: &Tensor, predictions: &[Prediction], temperature: f32, scores: &mut Scores) {
    todo!()
}

/// From `d_logprob` (one a prediction; log-prob only, entropy has no gradient here): `d_hidden[T, H]` overwritten, `d_head[H, V]` added to.
pub fn backward(
    hidden: &Tensor,
    head: &Tensor,
    predictions: &[Prediction],
    temperature: f32,
    scores: &Scores,
    d_logprob: &[f32],
    d_hidden: &mut Tensor,
    d_head: &mut Tensor,
) {
    todo!()
}

/// The natural log-probs of the whole vocabulary for the rows of `hidden[N, H]`, for sampling: `out[N, V]` at `temperature`. The entry of a
/// token equals [`forward`]'s log-prob bit for bit, whatever N.
pub fn distributions(hidden: &Tensor, head: &Tensor, temperature: f32, out: &mut Tensor) {
    todo!()
}
