//! Alarms: signs in a step's metrics of what commonly goes wrong in this kind of training, each with its likely cause and the
//! remedy. They are advice for a reader or a proposer; nothing is stopped or changed by them (a loss that is not finite is
//! not an alarm but a failure).
//!
//! Signs and remedies are those of MiniMax-M1 (arXiv:2506.13585 §3.2, §5), ScaleRL (arXiv:2510.13786) and DAPO
//! (arXiv:2503.14476); thresholds that they do not give are our choice, and say so here by being constants.

pub use hone_runs::alarm::{Alarm, FILE};
use hone_runs::{Result, folder};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// How many steps in a row a sign must show before it is an alarm.
pub const PATIENCE: u32 = 5;

/// The value of another metric of the same step.
type Others<'a> = dyn Fn(&str) -> Option<f64> + 'a;

struct Rule {
    name: &'static str,
    metric: &'static str,
    /// Whether the metric's value, beside the step's other metrics, is the sign.
    shows: fn(f64, &Others) -> bool,
    cause: &'static str,
    remedy: &'static str,
}

const RULES: [Rule; 10] = [
    Rule {
        name: "logprob-drift",
        metric: "rollout/logprob_exp_diff_mean",
        shows: |value, _| value > 0.01,
        cause: "the trainer's log-probs of sampled tokens differ from the sampler's: low precision in the head \
                or the lightning state, a stale cache, or another temperature",
        remedy: "keep head and state in FP32 on both sides, clear caches at each change of weights, and score at \
                the sampling temperature",
    },
    Rule {
        name: "route-drift",
        metric: "rollout/route_diff_share",
        shows: |value, _| value > 1e-3,
        cause: "the trainer sends sampled tokens to other experts than the sampler did",
        remedy: "replay the sampler's routes, or keep segmentation and precision equal on both sides",
    },
    Rule {
        name: "groups-equal",
        metric: "rl/zero_std_share",
        shows: |value, _| value > 0.8,
        cause: "nearly all groups have equal rewards, so hardly any advantage is left: the task is too hard or \
                too easy for the model",
        remedy: "give the stage before it more compute or an easier task where rewards are low, a harder task \
                where they are high; raise group or resample",
    },
    Rule {
        name: "entropy-collapse",
        metric: "rl/entropy",
        shows: |value, of| value < 0.02 && of("rl/reward").is_some_and(|r| r < 0.8),
        cause: "samples are nearly identical while the reward is not there yet: the learning rate or the ratio \
                cap is too high, or the temperature too low",
        remedy: "lower the stage's lr or ratio_cap, raise its temperature, or sample more prompts",
    },
    Rule {
        name: "clipped-tokens",
        metric: "rl/clipped_share",
        shows: |value, _| value > 0.2,
        cause: "the ratio's band changes the gradient of many tokens: PPO-style clipping drops rare tokens that \
                turn an answer",
        remedy: "use cispo, or a higher ratio_cap; fewer epochs and minibatches",
    },
    Rule {
        name: "truncated",
        metric: "rl/truncated_share",
        shows: |value, _| value > 0.15,
        cause: "many completions meet max_tokens: the window is too small, or the model rambles",
        remedy: "raise max_tokens, or set overlong: penalty or a repetition stop",
    },
    Rule {
        name: "long-negatives",
        metric: "rl/length_wrong",
        shows: |value, of| {
            of("rl/length_right").is_some_and(|right| value > 1.5 * right)
                && of("rl/truncated_share").is_some_and(|t| t > 0.05)
        },
        cause: "wrong completions grow longer than right ones and meet the window: their tails take over the \
                gradient",
        remedy: "set a repetition stop, normaliser: sequence-mean, and a lower clip and ratio_cap",
    },
    Rule {
        name: "ratio-far",
        metric: "rollout/logprob_diff_max",
        shows: |value, _| value > 0.05,
        cause: "importance ratios are not 1 before the first update: tempered sampling is not replayed, tokens \
                were re-encoded, or kernels depend on the batch",
        remedy: "use the same temperature on both sides, and pass token ids, never text",
    },
    Rule {
        name: "expert-load",
        metric: "train/expert_max_load",
        shows: |value, _| value > 3.0,
        cause: "one expert takes more than three times its even share of tokens, others starve",
        remedy: "raise optimizer.balance, or use a sigmoid router with a selection bias",
    },
    Rule {
        name: "under-eps",
        metric: "train/grad_under_eps",
        shows: |value, _| value > 0.2,
        cause: "a good part of the gradient is smaller than Adam's ε, which then decides the step",
        remedy: "set optimizer.eps: 1e-15 and optimizer.betas: [0.9, 0.95]",
    },
];

/// Watches a run's metrics and keeps its alarms' file.
pub(crate) struct Watch {
    path: PathBuf,
    raised: Vec<Alarm>,
}

impl Watch {
    /// Watches the run in `out`. Alarms of a dead segment past `from_step` are dropped.
    pub fn open(out: &Path, from_step: u64) -> Result<Self> {
        let path = out.join(FILE);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let kept = text.lines().filter_map(|line| serde_json::from_str::<Alarm>(line).ok());
        let mut watch = Self { path, raised: kept.filter(|alarm| alarm.step <= from_step).collect() };
        if !text.is_empty() {
            watch.write()?;
        }
        watch.raised.shrink_to_fit();
        Ok(watch)
    }

    /// Looks at the metrics of one step; `streaks` counts how long each sign has shown, and is part of the run's state.
    pub fn look(&mut self, step: u64, metrics: &[(&str, f64)], streaks: &mut Streaks) -> Result<Vec<Alarm>> {
        let of = |name: &str| metrics.iter().find(|(n, _)| *n == name).map(|(_, value)| *value);
        streaks.0.resize(RULES.len(), 0);
        let mut fresh = Vec::new();
        for (rule, streak) in RULES.iter().zip(&mut streaks.0) {
            let Some(value) = of(rule.metric) else { continue };
            *streak = match (rule.shows)(value, &of) {
                true => streak.saturating_add(1),
                // Once raised it stays raised for the stage.
                false if *streak >= PATIENCE => *streak,
                false => 0,
            };
            if *streak == PATIENCE {
                *streak += 1;
                let (cause, remedy) = (rule.cause.to_string(), rule.remedy.to_string());
                fresh.push(Alarm { step, name: rule.name.into(), metric: rule.metric.into(), value, cause, remedy });
            }
        }
        if !fresh.is_empty() {
            self.raised.extend(fresh.iter().cloned());
            self.write()?;
        }
        Ok(fresh)
    }

    fn write(&self) -> Result<()> {
        let line = |alarm| serde_json::to_string(alarm).expect("strings and finite numbers serialise") + "\n";
        folder::write_atomic(&self.path, self.raised.iter().map(line).collect::<String>().as_bytes())
    }
}

/// For how many steps in a row each rule's sign has shown, in the order of the rules.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Streaks(Vec<u32>);

#[cfg(test)]
mod tests {
    use super::*;

    fn look(watch: &mut Watch, streaks: &mut Streaks, step: u64, metrics: &[(&str, f64)]) -> Vec<String> {
        watch.look(step, metrics, streaks).unwrap().into_iter().map(|a| a.name).collect()
    }

    #[test]
    fn a_lasting_sign_is_an_alarm_once() {
        let dir = tempfile::tempdir().unwrap();
        let (mut watch, mut streaks) = (Watch::open(dir.path(), 0).unwrap(), Streaks::default());
        let bad = [("rl/zero_std_share", 0.95)];
        for step in 1..5 {
            assert!(look(&mut watch, &mut streaks, step, &bad).is_empty());
        }
        assert_eq!(look(&mut watch, &mut streaks, 5, &bad), ["groups-equal"]);
        for step in 6..20 {
            assert!(look(&mut watch, &mut streaks, step, &bad).is_empty());
        }
        let written = std::fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert!(written.contains("easier task"), "{written}");
    }

    #[test]
    fn a_passing_sign_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (mut watch, mut streaks) = (Watch::open(dir.path(), 0).unwrap(), Streaks::default());
        for step in 1..40 {
            let share = if step % 5 == 0 { 0.1 } else { 0.95 };
            assert!(look(&mut watch, &mut streaks, step, &[("rl/zero_std_share", share)]).is_empty());
        }
    }

    #[test]
    fn a_resumed_run_forgets_the_dead_segments_alarms() {
        let dir = tempfile::tempdir().unwrap();
        let (mut watch, mut streaks) = (Watch::open(dir.path(), 0).unwrap(), Streaks::default());
        (1..=5).for_each(|step| drop(look(&mut watch, &mut streaks, step, &[("rl/truncated_share", 0.5)])));
        assert_eq!(Watch::open(dir.path(), 5).unwrap().raised.len(), 1);
        assert_eq!(Watch::open(dir.path(), 4).unwrap().raised.len(), 0);
        assert_eq!(std::fs::read_to_string(dir.path().join(FILE)).unwrap(), "");
    }

    #[test]
    fn each_injected_fault_raises_its_own_alarm_first() {
        let faults: [(&str, &[(&str, f64)]); 10] = [
            ("logprob-drift", &[("rollout/logprob_exp_diff_mean", 0.03)]),
            ("route-drift", &[("rollout/route_diff_share", 0.1)]),
            ("groups-equal", &[("rl/zero_std_share", 1.0)]),
            ("entropy-collapse", &[("rl/entropy", 0.001), ("rl/reward", 0.3)]),
            ("clipped-tokens", &[("rl/clipped_share", 0.4)]),
            ("truncated", &[("rl/truncated_share", 0.3)]),
            ("long-negatives", &[("rl/length_wrong", 30.0), ("rl/length_right", 10.0), ("rl/truncated_share", 0.1)]),
            ("ratio-far", &[("rollout/logprob_diff_max", 0.4)]),
            ("expert-load", &[("train/expert_max_load", 4.0)]),
            ("under-eps", &[("train/grad_under_eps", 0.9)]),
        ];
        for (name, metrics) in faults {
            let dir = tempfile::tempdir().unwrap();
            let (mut watch, mut streaks) = (Watch::open(dir.path(), 0).unwrap(), Streaks::default());
            let raised: Vec<_> = (1..=5).flat_map(|step| look(&mut watch, &mut streaks, step, metrics)).collect();
            assert_eq!(raised, [name]);
        }
        let dir = tempfile::tempdir().unwrap();
        let (mut watch, mut streaks) = (Watch::open(dir.path(), 0).unwrap(), Streaks::default());
        let healthy =
            [("rl/entropy", 0.001), ("rl/reward", 0.99), ("rl/zero_std_share", 0.5), ("train/expert_max_load", 1.4)];
        assert!((1..=9).all(|step| look(&mut watch, &mut streaks, step, &healthy).is_empty()));
    }
}
