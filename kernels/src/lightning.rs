//! Lightning attention over a forest (MiniMax-01, arXiv:2501.08313): o_t = q_tᵀ KV_t, KV_t = e^{-s} KV_{t-1} + k_t v_tᵀ per head,
//! computed in chunks of `block` tokens counted from each segment's start (a segment boundary is a chunk boundary; a
//! segment starts from its parent's final state). No scale, no denominator. Decoding with a [`State`] equals [`forward`] bit for bit
//! where segmentation is equal: a row reads the state of its chunk's start and the keys and values since.

use crate::{Forest, Tensor};

/// Shape of the attention: `q, k, v [T, heads · d]`, one decay rate a head.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// Width of a head.
    pub head_dim: usize,
    /// s > 0 a head: a step multiplies the state by e^{-s}. Its length is the number of heads.
    pub slopes: Vec<f32>,
    /// Tokens a chunk.
    pub block: usize,
}

/// What decoding keeps: the state `[heads, d, d]` at the last chunk boundary, and keys and values since (row-major
/// `[n, heads · d]`, n ≤ block).
#[derive(Clone, Debug, Default)]
pub struct State {
    /// KV at the last chunk boundary, f32.
    pub kv: Vec<f32>,
    /// Keys since.
    pub keys: Vec<f32>,
    /// Values since.
    pub values: Vec<f32>,
}

impl State {
    /// The state before the first token.
    pub fn empty(shape: &Heads) -> Self {
        todo!()
    }
    /// Folds the open chunk into the state, as a segment's end does; call it before a child segment starts.
    pub fn close(&mut self, shape: &Heads) {
        todo!()
    }
}

/// `out[T, heads · d]`. `finals`, where given, gets the state after each segment's last row (its open chunk folded), one
/// `[heads · d · d]` a segment; without it, only the states that children start from are computed.
pub fn forward(
    shape: &Heads,
    forest: &Forest,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &mut Tensor,
    finals: Option<&mut Vec<Vec<f32>>>,
) {
    todo!()
}

/// Gradients (overwritten). States are recomputed from k and v; the gradient of a segment's final state is the sum over its children.
pub fn backward(
    shape: &Heads,
    forest: &Forest,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    d_out: &Tensor,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    todo!()
}

/// One row `[heads · d]` each: takes its key and value into `state` (folding the chunk before when it was full), writes `out`.
pub fn row(shape: &Heads, q: &[f32], k: &[f32], v: &[f32], state: &mut State, out: &mut [f32]) {
    todo!()
}

/// Decay rates of MiniMax's own code: ALiBi slopes (nearest lower power of two, then every second of the doubled count) times
/// `1 − layer/(layers − 1) + 1e-5`, with the absolute layer index; 1 + 1e-5 where `layers` is 1.
pub fn slopes(heads: usize, layer: usize, layers: usize) -> Vec<f32> {
    todo!()
}
