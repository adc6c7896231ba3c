//! AdamW (Loshchilov & Hutter, arXiv:1711.05101), fused, with clipping by the global norm.

/// Settings; MiniMax-M1's defaults are 0.9 / 0.95 / 1e-15 (arXiv:2506.13585 §3.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first and second moments.
    pub betas: (f32, f32),
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled: p is multiplied by 1 − lr · weight_decay first.
    pub weight_decay: f32,
}

/// One step of one tensor. `t` is the step's number from 1; each gradient is multiplied by `grad_scale` as it is read.
pub fn step(settings: AdamW, t: u64, grad_scale: f32, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    todo!()
}

/// Sum of squares in f64, in fixed blocks.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    todo!()
}
