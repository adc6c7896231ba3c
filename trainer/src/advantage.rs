//! Advantages from the rewards of one prompt's group. Pure functions, in f64 with two passes: E[x²] − E[x]² leaves a
//! residue that a division by a tiny deviation turns into thousands.

use serde::{Deserialize, Serialize};

/// What is added to the standard deviation: a floor for groups that are nearly equal.
pub const STD_EPS: f64 = 1e-6;

/// How a group's rewards become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Advantage {
    /// (R − mean) / (std + 1e-6), the population's deviation (ddof 0). MiniMax-M1's eq 2, which leaves ddof open.
    #[default]
    MeanStd,
    /// The same with the sample's deviation (ddof 1).
    MeanStdSample,
    /// R − mean (Dr. GRPO, arXiv:2503.20783).
    Mean,
    /// R − the mean of the others (RLOO, arXiv:2402.14740).
    LeaveOneOut,
}

/// One advantage a reward. Equal rewards give exactly 0, and so does a group of one: there is nothing to compare with.
pub fn advantages(kind: Advantage, rewards: &[f64]) -> Vec<f64> {
    if all_equal(rewards) {
        return vec![0.0; rewards.len()];
    }
    let n = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / n;
    let deviation = |ddof: f64| (rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (n - ddof)).sqrt() + STD_EPS;
    let scale = match kind {
        Advantage::MeanStd => 1.0 / deviation(0.0),
        Advantage::MeanStdSample => 1.0 / deviation(1.0),
        Advantage::Mean => 1.0,
        // R − (n·mean − R) / (n − 1) = (R − mean) · n / (n − 1).
        Advantage::LeaveOneOut => n / (n - 1.0),
    };
    rewards.iter().map(|r| (r - mean) * scale).collect()
}

/// Whether a group teaches nothing: tested by equality, never by a deviation near zero.
pub fn all_equal(rewards: &[f64]) -> bool {
    rewards.windows(2).all(|w| w[0] == w[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: &[f64], want: &[f64], within: f64) {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < within), "{got:?} is not {want:?}");
    }

    #[test]
    fn the_deviation_is_the_one_named() {
        let rewards = [1.0, 0.0, 0.0, 1.0];
        let of = |kind| advantages(kind, &rewards);
        near(&of(Advantage::MeanStdSample), &[0.866_024, -0.866_024, -0.866_024, 0.866_024], 1e-6);
        near(&of(Advantage::MeanStd), &[0.999_998, -0.999_998, -0.999_998, 0.999_998], 1e-6);
        near(&of(Advantage::Mean), &[0.5, -0.5, -0.5, 0.5], 0.0 + f64::EPSILON);
    }

    #[test]
    fn equal_rewards_give_exactly_zero() {
        for kind in [Advantage::MeanStd, Advantage::MeanStdSample, Advantage::Mean, Advantage::LeaveOneOut] {
            for reward in [0.1, 0.35, 1.0 / 3.0] {
                assert_eq!(advantages(kind, &[reward; 7]), [0.0; 7]);
            }
            assert_eq!(advantages(kind, &[0.7]), [0.0]);
            assert!(advantages(kind, &[]).is_empty());
        }
    }

    #[test]
    fn leave_one_out_has_no_residue() {
        let mut rewards = [0.35; 8];
        rewards[7] = 0.0;
        let got = advantages(Advantage::LeaveOneOut, &rewards);
        near(&got[..7], &[0.05; 7], 1e-12);
        near(&got[7..], &[-0.35], 1e-12);
    }

    #[test]
    fn nearly_equal_rewards_stay_bounded() {
        let got = advantages(Advantage::MeanStd, &[0.35, 0.35 + 1e-12, 0.35, 0.35]);
        assert!(got.iter().all(|a| a.abs() < 1e-5), "{got:?}");
    }
}
