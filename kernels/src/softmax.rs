//! Causal softmax attention with grouped queries over a forest. Heads lie side by side: `q[T, heads · d]`, `k, v[T, kv_heads · d]`.
//! A row's result depends only on the keys it sees, in order, never on how they are cut into runs; so decoding with a
//! cache ([`row`]) equals [`forward`] bit for bit.

use crate::{Forest, Tensor};

/// Shape of the attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies q·k; 1/√d as usual.
    pub scale: f32,
}

/// A run of cached keys and values, `[n, kv_heads · d]` each.
pub type Run<'a> = (&'a [f32], &'a [f32]);

/// `out[T, heads · d]`, and `lse[T, heads]`, the log of the softmax's denominator with its maximum added back.
pub fn forward(shape: Heads, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor, out: &mut Tensor, lse: &mut Tensor) {
    todo!()
}

/// Gradients (overwritten) from what [`forward`] left: keys run over rows i with j ≤ i < end of j's subtree, in a fixed order.
pub fn backward(
    shape: Heads,
    forest: &Forest,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    d_out: &Tensor,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    todo!()
}

/// One row: `out[heads · d]` for `q[heads · d]` over all keys in `runs`, oldest first, its own the last.
pub fn row(shape: Heads, q: &[f32], runs: &[Run], out: &mut [f32]) {
    todo!()
}
