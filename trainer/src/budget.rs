//! What a run has spent, and where its stages end. Compute is counted, not timed: rows through the model and
//! floating-point operations, rollouts included. The formula of the operations is the config's.

use crate::{config::ModelConfig, recipe::Compute};
use hone_kernels::Forest;
use serde::{Deserialize, Serialize};

/// What has been spent since the run began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Rows through the model.
    pub tokens: u64,
    /// Floating-point operations.
    pub flops: f64,
    /// Wall time of the steps; kept only where it is a limit, since nothing else that is saved may depend on the clock.
    pub seconds: f64,
}

impl Spent {
    /// Counts a forward and backward pass over `forest`.
    pub fn train(&mut self, config: &ModelConfig, forest: &Forest) {
        let rows = forest.rows() as u64;
        let seen: u64 = forest.positions().iter().map(|&p| u64::from(p) + 1).sum();
        self.tokens += rows;
        self.flops += config.train_flops(rows, seen as f64 / rows.max(1) as f64);
    }

    /// Counts sampling completions of `lengths` tokens from a prompt of `prompt` tokens, which is read once.
    pub fn rollout(&mut self, config: &ModelConfig, prompt: usize, lengths: impl Iterator<Item = usize>) {
        let mut forward = |rows: usize, before: usize| {
            self.tokens += rows as u64;
            self.flops += config.forward_flops(rows as u64, before as f64 + (rows as f64 + 1.0) / 2.0);
        };
        forward(prompt, 0);
        lengths.for_each(|n| forward(n, prompt));
    }

    /// The share of `limits` that is spent, by the limit nearest to its end; 1 and above is over.
    pub fn share(&self, limits: &Compute) -> f64 {
        let limits = limits.resolved();
        let of = |spent: f64, limit: Option<f64>| limit.map_or(0.0, |limit| spent / limit);
        of(self.tokens as f64, limits.tokens.map(|n| n.0 as f64))
            .max(of(self.flops, limits.flops.map(|n| n.0 as f64)))
            .max(of(self.seconds, limits.seconds.map(|s| s.as_seconds())))
    }
}

/// The share of the whole compute at which each stage ends, from the stages' relative shares. The last is exactly 1.
pub fn ends(shares: &[f64]) -> Vec<f64> {
    let total: f64 = shares.iter().sum();
    let mut before = 0.0;
    let mut ends: Vec<f64> = shares
        .iter()
        .map(|share| {
            before += share;
            before / total
        })
        .collect();
    if let Some(last) = ends.last_mut() {
        *last = 1.0;
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;
    use hone_runs::quantity::{Count, Span};

    #[test]
    fn the_nearest_limit_rules() {
        let spent = Spent { tokens: 500, flops: 9e9, seconds: 2.0 };
        let limits = Compute { tokens: Some(Count(1000)), flops: Some(Count(10_000_000_000)), seconds: None };
        assert_eq!(spent.share(&limits), 0.9);
        assert_eq!(spent.share(&Compute { seconds: Some(Span::seconds(1)), ..limits }), 2.0);
        assert_eq!(spent.share(&Compute::default()), 500.0 / 1e6);
    }

    #[test]
    fn stages_end_at_their_cumulative_shares() {
        assert_eq!(ends(&[1.0, 3.0]), [0.25, 1.0]);
        assert_eq!(ends(&[0.1; 10]).last(), Some(&1.0));
        assert!(ends(&[]).is_empty());
    }

    #[test]
    fn sampled_tokens_cost_a_third_of_trained_ones_and_count_whole() {
        let config = Preset::HybridNano.config(257);
        let mut rollout = Spent::default();
        rollout.rollout(&config, 6, [3, 4].into_iter());
        assert_eq!(rollout.tokens, 6 + 3 + 4);
        let mut train = Spent::default();
        train.train(&config, &Forest::from_sequences([&[1u32, 2, 3, 4, 5, 6][..]]));
        let mut prompt = Spent::default();
        prompt.rollout(&config, 6, std::iter::empty());
        assert!((train.flops / prompt.flops - 3.0).abs() < 1e-9);
    }
}
