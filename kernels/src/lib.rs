//! The fused tensor operations of Hone: one module an operation, each with a `forward` and a `backward` by hand and a
//! plain scalar twin that it is tested against.
//!
//! Conventions, the same in every module:
//!
//! - A tensor is row-major; a batch of T rows of width H is `[T, H]`. Weights lie `[in, out]`.
//! - Outputs are resized by the callee (`Tensor::resize`), so a workspace is reused from step to step.
//! - Gradients of activations are **overwritten**; gradients of weights are **added to**.
//! - A row's result depends neither on its batch mates nor on the number of threads: fixed blocks, combined in index
//!   order; no floating `sum` or `reduce` of rayon.
//! - All numeric work runs inside a [`threads::Pool`], whose workers flush denormals.
//! - Nothing here knows a model: shapes and slopes, positions and predictions come from the caller.

pub mod adamw;
mod blocks;
mod columns;
pub mod embedding;
pub mod experts;
pub mod forest;
pub mod head;
pub mod lightning;
pub mod limits;
pub mod linear;
mod matrix;
pub mod norm;
#[cfg(test)]
mod oracle;
pub mod pointwise;
pub mod rope;
pub mod router;
mod scratch;
pub(crate) mod simd;
pub mod softmax;
pub mod tensor;
pub mod threads;
mod trees;

pub use forest::{Forest, ForestError, Prediction, Segment};
pub use matrix::bf16_available;
pub use simd::instruction_set;
pub use tensor::{Dtype, Tensor};
