//! What a decoder is made of: the model config, its presets, and the counts that follow from it.

use serde::{Deserialize, Serialize};

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mixer {
    /// Softmax attention with grouped queries and partial RoPE.
    Softmax,
    /// Lightning attention with decay, output norm and sigmoid gate.
    Lightning,
}

/// Where the norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Norm {
    /// x + f(norm(x)).
    Pre,
    /// MiniMax-01's scaled post-norm: h = norm(x); x = α·h + β·f(h).
    Post {
        /// Multiplies the normalised residual.
        alpha: f32,
        /// Multiplies the branch.
        beta: f32,
    },
}
