//! Top-k routing of rows to experts: softmax (MiniMax-01), or sigmoid with a selection bias (MiniMax-M2); f32.

use crate::Tensor;

/// How scores become choices and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts, top-k, weights renormalised over the chosen.
    Softmax,
    /// p = sigmoid(logit); top-k of p + bias; weights p renormalised over the chosen. The bias never enters a weight.
    SigmoidBias,
}

/// Chosen experts and their weights, row by row; within a row by falling score, ties to the lower index.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// `[T, k]`.
    pub experts: Vec<u32>,
    /// `[T, k]`, each row sums to 1.
    pub weights: Vec<f32>,
    /// Scores `[T, E]` (softmax or sigmoid), kept for backward and the auxiliary loss.
    pub scores: Tensor,
    /// Experts a row.
    pub k: usize,
}

/// Routes `logits[T, E]`. With `replay` (`[T, k]` ids) those experts are taken, their weights gathered from today's full scores.
pub fn forward(
    scoring: Scoring,
    logits: &Tensor,
    bias: Option<&[f32]>,
    k: usize,
    replay: Option<&[u32]>,
    routes: &mut Routes,
) {
    todo!()
}

/// `d_logits[T, E]` (overwritten) from `d_weights[T, k]`; `d_scores`, where given, is the auxiliary loss's gradient `[T, E]`.
pub fn backward(
    scoring: Scoring,
    routes: &Routes,
    d_weights: &[f32],
    d_scores: Option<&Tensor>,
    d_logits: &mut Tensor,
) {
    todo!()
}

/// The load-balancing loss in Hugging Face's scaling: E · Σ_e f_e · P_e, f_e the share of choices an expert gets times k and P_e its mean
/// score, each row weighed by `uses` (balanced top-2 gives 2.0). Adds `coefficient` times its gradient to `d_scores[T, E]` where given.
pub fn balance_loss(routes: &Routes, uses: &[u32], coefficient: f32, d_scores: Option<&mut Tensor>) -> f32 {
    todo!()
}
