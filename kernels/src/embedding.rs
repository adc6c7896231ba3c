//! Token embedding: a gather, and its scatter in the order of ids.

use crate::Tensor;

/// `out[T, H]` = rows of `table[V, H]` named by `tokens`. Panics on a token past the table.
pub fn forward(table: &Tensor, tokens: &[u32], out: &mut Tensor) {
    todo!()
}

/// `d_table[V, H] += ` the rows of `d_out[T, H]`, added per id in row order.
pub fn backward(tokens: &[u32], d_out: &Tensor, d_table: &mut Tensor) {
    todo!()
}
