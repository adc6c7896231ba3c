//! Diagnoses: signs in the incumbent's curves of what commonly goes wrong, each with its likely cause and the
//! edits of the recipe that mend it, most urgent first. Looks at one incumbent only; what was tried before is the search's.
//!
//! Signs and remedies are those of MiniMax-M1 (arXiv:2506.13585 §3.2, §5), DAPO (arXiv:2503.14476) and ScaleRL
//! (arXiv:2510.13786). Thresholds and factors that they do not give are ours, and stand here as constants.

use serde_json::Value;

use crate::digest::Series;
use crate::edit::show;
use crate::proposal::Observation;
use crate::space::{Space, same};

/// A sign, its cause, and what may mend it.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The rule's name, e.g. `still-improving`.
    pub rule: &'static str,
    /// The sign with its numbers and the cause: a clause without a period.
    pub because: String,
    /// Edits of the recipe, the likeliest first; never empty.
    pub remedies: Vec<Remedy>,
}

/// Keys of the recipe and their new values.
pub type Remedy = Vec<(String, Value)>;

/// Share of a gradient's coordinates below Adam's ε that is too much.
const UNDER_EPS: f64 = 0.2;
/// Times its even share of tokens that an expert may take.
const EXPERT_LOAD: f64 = 3.0;
/// Share of groups with equal rewards that leaves too little to learn from.
const GROUPS_EQUAL: f64 = 0.6;
/// Nats a token below which samples are nearly identical.
const ENTROPY: f64 = 0.02;
/// Share of its beginning to which entropy may fall.
const ENTROPY_FALL: f64 = 0.1;
/// Reward from which low entropy is only success.
const SOLVED: f64 = 0.8;
/// Share of tokens whose ratio is clipped.
const CLIPPED: f64 = 0.1;
/// Share of completions cut off (ScaleRL: 10–15% warn of instability).
const TRUNCATED: f64 = 0.12;
/// Standard errors that a turn for the worse over the last quarter must have.
const CLEAR: f64 = 3.0;
/// Standard errors that progress over the last quarter must have: to look for more where there is none costs little.
const LIKELY: f64 = 2.0;
/// Relative rise of a loss over the last quarter that is steep.
const STEEP: f64 = 0.05;
/// Relative fall of a loss over the last quarter that is not done, though the learning rate is low by then.
const FALLING: f64 = 0.02;
/// Rise or fall of a reward over the last quarter that is steep.
const STEEP_REWARD: f64 = 0.02;
/// Scatter of the gradient norm over the last quarter, relative to its mean: above, training is spiky.
const SPIKY: f64 = 1.0;

/// All findings, most urgent first.
pub fn diagnose(observation: &Observation, space: &Space) -> Vec<Finding> {
    let rules = [
        diverging,
        under_eps,
        expert_load,
        groups_equal,
        entropy_collapse,
        clipped_tokens,
        truncated,
        long_negatives,
        too_large,
        still_improving,
    ];
    let stages = stages(observation, space);
    let see = |rule: fn(&Sight) -> Option<Finding>| {
        stages.iter().filter_map(move |(stage, kind)| {
            rule(&Sight { observation, space, stage: *stage, kind }).filter(|found| !found.remedies.is_empty())
        })
    };
    rules.into_iter().flat_map(see).collect()
}

/// The recipe's stages with their kinds, as far as the recipe names them.
fn stages(observation: &Observation, space: &Space) -> Vec<(usize, String)> {
    let mut stages: Vec<(usize, String)> = Vec::new();
    let keys = space.known.keys().map(String::as_str).chain(space.dimensions.iter().map(|d| d.key.as_str()));
    for key in keys {
        let mut parts = key.split('.');
        if let (Some("stages"), Some(index), Some(kind)) = (parts.next(), parts.next(), parts.next()) {
            let stage = (index.parse().unwrap_or(0), kind.to_string());
            if !stages.contains(&stage) {
                stages.push(stage);
            }
        }
    }
    stages.sort();
    stages.retain(|(stage, _)| observation.curves.keys().any(|name| name.starts_with(&format!("stages.{stage}/"))));
    stages
}

/// One stage of the incumbent's run.
struct Sight<'a> {
    observation: &'a Observation,
    space: &'a Space,
    stage: usize,
    kind: &'a str,
}

impl Sight<'_> {
    fn curve(&self, name: &str) -> Option<&Series> {
        self.observation.curves.get(&format!("stages.{}/{name}", self.stage)).filter(|s| s.n > 0)
    }

    fn mean(&self, name: &str) -> Option<f64> {
        Some(self.curve(name)?.tail_mean)
    }

    fn key(&self, name: &str) -> String {
        format!("stages.{}.{}.{name}", self.stage, self.kind)
    }

    /// The stage's key times `factor`; the optimizer's where the stage has none of the name.
    fn times(&self, name: &str, factor: f64) -> Option<Remedy> {
        let own = self.space.dimension(&self.key(name));
        let dimension = own.or_else(|| self.space.dimension(&format!("optimizer.{name}")))?;
        Some(vec![(dimension.key.clone(), dimension.scaled(factor)?)])
    }

    /// A key of the recipe set to a value; None where the recipe has no such key or it has that value.
    fn to(&self, key: &str, value: Value) -> Option<Remedy> {
        let known = self.space.known.get(key).or_else(|| self.space.dimension(key)?.current.as_ref());
        let exists = known.is_some() || self.space.dimension(key).is_some();
        (exists && known.is_none_or(|now| !same(now, &value))).then(|| vec![(key.to_string(), value)])
    }

    /// A finding with those remedies that the recipe can take.
    fn find(&self, rule: &'static str, because: String, remedies: impl IntoIterator<Item = Option<Remedy>>) -> Finding {
        Finding { rule, because, remedies: remedies.into_iter().flatten().collect() }
    }

    fn place(&self) -> String {
        format!("stage {} ({})", self.stage, self.kind)
    }
}

/// The rise over the last quarter in its standard errors: a line's through n even points is noise · √(12/n).
fn clarity(series: &Series) -> f64 {
    let n = (series.n as f64 / 4.0).max(4.0);
    let error = series.tail_noise * (12.0 / n).sqrt();
    if error > 0.0 { series.tail_rise / error } else { series.tail_rise * f64::INFINITY }
}

fn calm(sight: &Sight) -> bool {
    sight.curve("train/grad_norm").is_none_or(|norm| norm.nonfinite == 0 && norm.tail_noise < SPIKY * norm.tail_mean)
}

fn diverging(sight: &Sight) -> Option<Finding> {
    let loss = sight.observation.curves.get(&format!("stages.{}/train/loss", sight.stage))?;
    let remedies = [sight.times("lr", 1.0 / 3.0), sight.times("clip", 1.0 / 3.0)];
    let place = sight.place();
    if loss.nonfinite > 0 {
        let because =
            format!("the loss of {place} was not finite at {} steps: the learning rate is too high", loss.nonfinite);
        return Some(sight.find("diverging", because, remedies));
    }
    if let Some(reward) = sight.curve("rl/reward") {
        let falls =
            reward.tail_rise < -STEEP_REWARD && clarity(reward) < -CLEAR && reward.max > reward.tail_mean + 0.05;
        return falls.then(|| {
            let (max, mean) = (reward.max, reward.tail_mean);
            let because = format!("the reward of {place} fell from {max:.3} to {mean:.3}: steps are too large");
            sight.find("diverging", because, remedies)
        });
    }
    let rises = loss.tail_rise > STEEP * loss.tail_mean.abs() && clarity(loss) > CLEAR;
    let spiky = !calm(sight) && loss.tail_mean > 1.2 * loss.min;
    (sight.kind == "sft" && (rises || spiky)).then(|| {
        let (min, mean) = (loss.min, loss.tail_mean);
        let how = if rises { "rises again" } else { "is spiky" };
        let because = format!("the loss of {place} {how}, from {min:.3} to {mean:.3}: the learning rate is too high");
        sight.find("diverging", because, remedies)
    })
}

fn under_eps(sight: &Sight) -> Option<Finding> {
    let share = sight.mean("train/grad_under_eps")?;
    (share > UNDER_EPS).then(|| {
        let because = format!(
            "{:.0}% of the gradient of {} is smaller than Adam's ε, which then decides the step",
            100.0 * share,
            sight.place()
        );
        let eps = sight.to("optimizer.eps", 1e-15.into());
        let betas = sight.to("optimizer.betas", serde_json::json!([0.9, 0.95]));
        let both = eps.clone().zip(betas.clone()).map(|(a, b)| [a, b].concat());
        sight.find("under-eps", because, [both, eps, betas])
    })
}

fn expert_load(sight: &Sight) -> Option<Finding> {
    let load = sight.mean("train/expert_max_load")?;
    (load > EXPERT_LOAD).then(|| {
        let because =
            format!("one expert takes {load:.1} times its even share of tokens in {}, others starve", sight.place());
        sight.find("expert-load", because, [sight.times("balance", 10.0), sight.times("balance", 3.0)])
    })
}

fn groups_equal(sight: &Sight) -> Option<Finding> {
    let (equal, reward) = (sight.mean("rl/zero_std_share")?, sight.mean("rl/reward")?);
    (equal > GROUPS_EQUAL).then(|| {
        let hard = reward < 0.5;
        let because = format!(
            "{:.0}% of the groups of {} have equal rewards (mean {reward:.3}), so hardly any advantage is left: the task is too {}",
            100.0 * equal,
            sight.place(),
            if hard { "hard for the model so far" } else { "easy by now" }
        );
        let sampling = sight.to(&sight.key("dynamic_sampling"), true.into());
        let resample = sight.to(&sight.key("resample"), 1.into());
        // A stage before it that teaches more makes the task easier; a larger group finds the rare success.
        let before = |dimension: &&crate::space::Dimension| {
            dimension.name() == "share" && sight.stage > 0 && dimension.key.starts_with(&format!("stages.{}.", sight.stage - 1))
        };
        let teach = sight.space.dimensions.iter().find(before).and_then(|d| Some(vec![(d.key.clone(), d.scaled(2.0)?)]));
        let remedies = if hard {
            [sampling, teach, sight.times("group", 2.0), resample]
        } else {
            [sampling, sight.times("temperature", 1.2), resample, sight.times("group", 2.0)]
        };
        sight.find("groups-equal", because, remedies)
    })
}

fn entropy_collapse(sight: &Sight) -> Option<Finding> {
    let (entropy, reward) = (sight.curve("rl/entropy")?, sight.mean("rl/reward")?);
    let low = entropy.tail_mean < ENTROPY || entropy.tail_mean < ENTROPY_FALL * entropy.first;
    (low && reward < SOLVED).then(|| {
        let (first, mean) = (entropy.first, entropy.tail_mean);
        let because = format!(
            "entropy of {} fell from {first:.3} to {mean:.3} while the reward is only {reward:.3}: samples are nearly identical, steps too large",
            sight.place()
        );
        let remedies =
            [sight.times("lr", 0.5), sight.times("temperature", 1.2), sight.times("prompts", 2.0), sight.times("ratio_cap", 0.5)];
        sight.find("entropy-collapse", because, remedies)
    })
}

fn clipped_tokens(sight: &Sight) -> Option<Finding> {
    let share = sight.mean("rl/clipped_share")?;
    (share > CLIPPED).then(|| {
        let because = format!(
            "the ratio of {:.0}% of the tokens of {} is clipped: rare tokens that turn an answer are dropped or held back",
            100.0 * share,
            sight.place()
        );
        let remedies = [
            sight.to(&sight.key("algorithm"), "cispo".into()),
            sight.times("ratio_cap", 2.0),
            sight.to(&sight.key("epochs"), 1.into()),
            sight.to(&sight.key("minibatches"), 1.into()),
        ];
        sight.find("clipped-tokens", because, remedies)
    })
}

fn truncated(sight: &Sight) -> Option<Finding> {
    let share = sight.mean("rl/truncated_share")?;
    (share > TRUNCATED).then(|| {
        let because = format!(
            "{:.0}% of the completions of {} are cut off: the window is too small, or the model rambles",
            100.0 * share,
            sight.place()
        );
        let key = sight.key("max_tokens");
        let longer =
            sight.space.known.get(&key).and_then(Value::as_u64).map(|n| vec![(key, Value::from(n + n.div_ceil(2)))]);
        sight.find("truncated", because, [longer, sight.to(&sight.key("overlong"), "penalty".into())])
    })
}

fn long_negatives(sight: &Sight) -> Option<Finding> {
    let (wrong, right) = (sight.mean("rl/length_wrong")?, sight.mean("rl/length_right")?);
    (wrong > 1.5 * right && sight.mean("rl/truncated_share")? > 0.05).then(|| {
        let because = format!(
            "wrong completions of {} are {wrong:.1} tokens long, right ones {right:.1}: their tails take over the gradient",
            sight.place()
        );
        let remedies = [sight.to(&sight.key("normaliser"), "sequence-mean".into()), sight.times("clip", 0.5), sight.times("ratio_cap", 0.5)];
        sight.find("long-negatives", because, remedies)
    })
}

/// The fall of a supervised loss over the last quarter, where it is not done and the gradient is calm.
fn falling<'a>(sight: &Sight<'a>) -> Option<&'a Series> {
    let loss = sight.observation.curves.get(&format!("stages.{}/train/loss", sight.stage))?;
    let falls = loss.tail_rise < -FALLING * loss.tail_mean.abs() && clarity(loss) < -LIKELY;
    (sight.kind == "sft" && falls && calm(sight)).then_some(loss)
}

fn still_improving(sight: &Sight) -> Option<Finding> {
    let place = sight.place();
    let remedies = || {
        [
            sight.times("batch", 0.5),
            sight.times("lr", 2.0),
            sight.times("share", 2.0),
            sight.times("lr", 4.0),
            sight.times("batch", 0.25),
        ]
    };
    if let Some(reward) = sight.curve("rl/reward") {
        let rises = reward.tail_rise > STEEP_REWARD && clarity(reward) > LIKELY && calm(sight);
        return rises.then(|| {
            let (rise, mean) = (reward.tail_rise, reward.tail_mean);
            let because = format!("the reward of {place} still rose by {rise:.3} over the last quarter (to about {mean:.3}) with a calm gradient: it is not done");
            sight.find("still-improving", because, remedies())
        });
    }
    falling(sight).map(|loss| {
        let (fall, mean) = (-loss.tail_rise, loss.tail_mean);
        let because = format!("the loss of {place} still fell by {fall:.3} over the last quarter (to about {mean:.3}) with a calm gradient: it is not done");
        sight.find("still-improving", because, remedies())
    })
}

/// Under a budget of operations, a model that is still improving is too large for it (Hoffmann et al., arXiv:2203.15556). Asked before
/// the learning rate is: halving the model doubles its updates.
fn too_large(sight: &Sight) -> Option<Finding> {
    let loss = falling(sight).filter(|_| sight.space.known.contains_key("compute.flops"))?;
    let because = format!(
        "the loss of {} still fell by {:.3} over the last quarter, and operations are what is counted: a smaller model gets more updates from them",
        sight.place(),
        -loss.tail_rise
    );
    let sizes = ["model.layers", "model.hidden_size", "model.intermediate_size"];
    let remedies = sizes.map(|key| Some(vec![(key.to_string(), sight.space.dimension(key)?.smaller()?)]));
    Some(sight.find("too-large", because, remedies))
}

impl Finding {
    /// The hypothesis of a remedy: sign, cause, change.
    pub fn hypothesis(&self, space: &Space, remedy: &Remedy) -> String {
        let because = &self.because;
        let mut first = because.chars();
        let because = first.next().map(|c| c.to_uppercase().collect::<String>() + first.as_str()).unwrap_or_default();
        format!("{because}. Therefore {}.", describe(space, remedy))
    }
}

/// `optimizer.lr from 0.001 to 0.003 and …`.
pub fn describe(space: &Space, remedy: &Remedy) -> String {
    let one = |(key, value): &(String, Value)| {
        let now = space.known.get(key).or_else(|| space.dimension(key)?.current.as_ref());
        match now {
            Some(now) => format!("{key} from {} to {}", show(now), show(value)),
            None => format!("{key} to {}", show(value)),
        }
    };
    let all: Vec<String> = remedy.iter().map(one).collect();
    match &all[..] {
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
        [] => String::new(),
    }
}
