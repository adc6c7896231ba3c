//! Grouped SwiGLU experts: y = Σ_e weight_e · w2_e(silu(w1_e x) ⊙ w3_e x). Rows are grouped by expert once; an expert without rows
//! costs nothing and gets no gradient.

use crate::{Tensor, router::Routes};

/// Weights `[E, H, I]`, `[E, H, I]`, `[E, I, H]`: gate (w1), up (w3), down (w2).
#[derive(Clone, Copy)]
pub struct Experts<'a> {
    /// Gate projection.
    pub w1: &'a Tensor,
    /// Up projection.
    pub w3: &'a Tensor,
    /// Down projection.
    pub w2: &'a Tensor,
}

/// Gradients of the same shapes, added to.
pub struct ExpertGrads<'a> {
    /// Of the gate projection.
    pub w1: &'a mut Tensor,
    /// Of the up projection.
    pub w3: &'a mut Tensor,
    /// Of the down projection.
    pub w2: &'a mut Tensor,
}

/// Rows sorted by expert and what backward needs of forward. Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Grouped {
    /// Source row of each grouped row, `[T·k]`, by expert, then by row.
    pub rows: Vec<u32>,
    /// Slot in `[T, k]` of each grouped row.
    pub slots: Vec<u32>,
    /// Where each expert's rows begin, `[E + 1]`.
    pub starts: Vec<usize>,
    /// Gathered inputs `[T·k, H]`.
    pub x: Tensor,
    /// w1 x, `[T·k, I]`.
    pub gate: Tensor,
    /// w3 x, `[T·k, I]`.
    pub up: Tensor,
    /// w2 of the activation, before weighing, `[T·k, H]`.
    pub down: Tensor,
}

/// `out[T, H]` from `x[T, H]`.
pub fn forward(experts: Experts, x: &Tensor, routes: &Routes, grouped: &mut Grouped, out: &mut Tensor) {
    todo!()
}

/// `dx[T, H]` and `d_weights[T, k]` overwritten, weight gradients added to, from what [`forward`] left in `grouped`.
pub fn backward(
    experts: Experts,
    routes: &Routes,
    grouped: &Grouped,
    d_out: &Tensor,
    dx: &mut Tensor,
    d_weights: &mut Vec<f32>,
    grads: ExpertGrads,
) {
    todo!()
}
