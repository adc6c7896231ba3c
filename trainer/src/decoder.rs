//! The one decoder: explicit forward and backward over a forest, by config.

use crate::config::ModelConfig;
use hone_kernels::{Forest, Prediction, Tensor, head::Scores};
use hone_runs::Result;

/// Named tensors in a fixed order (by name): a decoder's weights, gradients or moments.
pub struct Weights {}

impl Weights {
    /// Zeros of the same names and shapes.
    pub fn zeros_like(&self) -> Self { todo!() }
    /// Sets all to zero.
    pub fn clear(&mut self) { todo!() }
    /// (name, tensor) in order. Names are Hugging Face's.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> { std::iter::empty() }
    /// (name, tensor) in the same order, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> { std::iter::empty() }
}

/// A model: config and weights.
pub struct Decoder {
    /// Shape.
    pub config: ModelConfig,
    /// Weights.
    pub weights: Weights,
}

/// Everything forward leaves for backward; grows to the largest batch and is reused.
#[derive(Default)]
pub struct Workspace {}

/// What a forward pass is asked beside its forest.
#[derive(Default)]
pub struct Pass<'a> {
    /// Expert ids a layer `[T, k]` to replay.
    pub replay: Option<&'a [Vec<u32>]>,
    /// Keep activations for backward.
    pub train: bool,
    /// Keep only each layer's input and recompute the rest in backward.
    pub recompute: bool,
}

impl Decoder {
    /// Fresh weights from `seed`.
    pub fn new(config: ModelConfig, seed: u64) -> Result<Self> { todo!() }
    /// Fills `ws` with the final hidden states `[T, H]` (after the last norm).
    pub fn forward(&self, forest: &Forest, pass: &Pass, ws: &mut Workspace) { todo!() }
    /// Log-prob and entropy of each prediction, after [`Self::forward`].
    pub fn score(&self, predictions: &[Prediction], temperature: f32, ws: &mut Workspace, scores: &mut Scores) { todo!() }
    /// Adds to `grads` the gradient for `d_logprob` a prediction, and `aux` times the balance loss's; returns the balance loss (mean over MoE layers).
    pub fn backward(&self, forest: &Forest, predictions: &[Prediction], temperature: f32, scores: &Scores, d_logprob: &[f32], aux: f32, ws: &mut Workspace, grads: &mut Weights) -> f32 { todo!() }
}
