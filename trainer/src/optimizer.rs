//! The optimizer: AdamW over named weights with clipping by the global norm, and the schedule of its learning rate. The
//! arithmetic of one tensor is the kernel's (`hone_kernels::adamw`).

use crate::{
    decoder::Weights,
    recipe::{OptimizerSpec, Schedule},
};
use hone_kernels::adamw::{self, AdamW, Survey};

/// AdamW's moments and its count of updates.
pub struct Optimizer {
    spec: OptimizerSpec,
    /// First moments, named as the weights.
    pub first: Weights,
    /// Second moments.
    pub second: Weights,
    /// Updates made.
    pub updates: u64,
}

/// What an update saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Global norm of the gradient, before clipping.
    pub norm: f64,
    /// What the gradient was multiplied with: below 1 where it was clipped.
    pub scale: f64,
    /// Share of the nonzero gradient elements whose size is below Adam's ε, where ε decides the step and not the gradient.
    pub under_eps: f64,
    /// Cosine of the gradient and the first moment before the update: how far successive gradients agree. 0 at the first.
    pub cosine: f64,
}

impl Optimizer {
    /// Moments of zero for `weights`.
    pub fn new(spec: OptimizerSpec, weights: &Weights) -> Self {
        Self { spec, first: weights.zeros_like(), second: weights.zeros_like(), updates: 0 }
    }

    /// One update of `weights` at learning rate `lr`; the gradient is 0 afterwards. Matrices decay; vectors (norms) do not.
    /// Where the gradient is not finite nothing is changed and the answer is None.
    pub fn update(&mut self, weights: &mut Weights, grads: &mut Weights, lr: f64) -> Option<Update> {
        let each = grads.iter().zip(self.first.iter()).map(|((_, g), (_, m))| adamw::survey(g.data(), m.data()));
        let seen = each.fold(Survey::default(), |a, b| a + b);
        let norm = seen.squares.sqrt();
        if !norm.is_finite() {
            return None;
        }
        let scale = if norm > self.spec.clip { self.spec.clip / norm } else { 1.0 };
        self.updates += 1;
        let mut small = 0;
        let moments = self.first.iter_mut().zip(self.second.iter_mut());
        for (((_, w), (_, g)), ((_, m), (_, v))) in weights.iter_mut().zip(grads.iter_mut()).zip(moments) {
            let decays = w.shape().len() > 1;
            let settings = AdamW {
                lr: lr as f32,
                betas: (self.spec.betas[0] as f32, self.spec.betas[1] as f32),
                eps: self.spec.eps as f32,
                weight_decay: if decays { self.spec.weight_decay as f32 } else { 0.0 },
            };
            small += adamw::step_tensor(settings, self.updates, scale as f32, w, [g, m, v]);
        }
        let length = norm * seen.moment_squares.sqrt();
        let cosine = if length > 0.0 { seen.along / length } else { 0.0 };
        Some(Update { norm, scale, under_eps: small as f64 / seen.nonzero.max(1) as f64, cosine })
    }
}

/// The learning rate of a stage's update number `update` (from 1), with `progress` of the stage's compute spent: it rises
/// over `warmup` updates to `highest`, and falls with progress to `final_lr` of it. A function of its arguments alone, so
/// a resumed run cannot step it twice.
pub fn learning_rate(spec: &OptimizerSpec, highest: f64, update: u64, progress: f64) -> f64 {
    let rise = if update < spec.warmup { update as f64 / spec.warmup as f64 } else { 1.0 };
    let progress = progress.clamp(0.0, 1.0);
    let left = match spec.schedule {
        Schedule::Constant => 1.0,
        Schedule::Linear => 1.0 - progress,
        Schedule::Cosine => (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0,
    };
    highest * rise * (spec.final_lr + (1.0 - spec.final_lr) * left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_counts_updates_and_not_calls() {
        let spec = OptimizerSpec { warmup: 10, schedule: Schedule::Constant, ..Default::default() };
        let at = |update| learning_rate(&spec, 1e-3, update, 0.0);
        assert!((at(5) - 0.5e-3).abs() < 1e-12);
        assert!((at(6) - 0.6e-3).abs() < 1e-12);
        assert!((at(10) - 1e-3).abs() < 1e-12 && (at(500) - 1e-3).abs() < 1e-12);
    }

    #[test]
    fn schedules_end_at_their_last_rate() {
        for (schedule, middle) in [(Schedule::Constant, 1.0), (Schedule::Linear, 0.55), (Schedule::Cosine, 0.55)] {
            let spec = OptimizerSpec { warmup: 0, schedule, final_lr: 0.1, ..Default::default() };
            let at = |progress| learning_rate(&spec, 1.0, 1, progress);
            let end = if schedule == Schedule::Constant { 1.0 } else { 0.1 };
            for (progress, want) in [(0.0, 1.0), (0.5, middle), (1.0, end), (1.7, end)] {
                assert!((at(progress) - want).abs() < 1e-12, "{schedule:?} at {progress}");
            }
        }
    }
}
