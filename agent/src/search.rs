//! The built-in search proposer: no network, no key, and a pure function of the observation. First the diagnoses of the
//! incumbent's curves, then a step further where a kept change pointed, then two good changes together, then TPE
//! (Bergstra et al., NeurIPS 2011) over what the schema marks tunable. It never proposes what was tried.

use std::collections::BTreeSet;

use hone_runs::{Class, Failure, Result, draws};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::edit::{Edit, apply_edits, parse, show};
use crate::judge::Verdict;
use crate::memory::forecast;
use crate::proposal::{Decision, Observation, Past, Proposal, Proposed, Proposer, Proposing, Usage};
use crate::rules::{Remedy, describe, diagnose};
use crate::space::{Dimension, Domain, Space, same};

/// The built-in search.
#[derive(Clone, Copy, Debug, Default)]
pub struct Search;

/// How often keys of a name are turned, before anything was measured; others 1. What a learning rate, a batch and the split of compute
/// do is rarely nothing, while most others are near their best by default: our experience, not a paper's.
const WEIGHT: [(&str, f64); 6] =
    [("lr", 4.0), ("share", 3.0), ("batch", 2.0), ("group", 2.0), ("prompts", 2.0), ("schedule", 1.5)];
/// Of a model's own shape.
const MODEL_WEIGHT: f64 = 0.5;
/// Tries to draw something new before the space counts as exhausted.
const TRIES: u64 = 500;
/// Trials of one key before TPE has anything to say about it.
const TRIALS: usize = 4;

impl Proposer for Search {
    fn name(&self) -> &str {
        "search"
    }

    fn propose<'a>(&'a self, observation: &'a Observation) -> Proposing<'a> {
        Box::pin(async move { search(observation) })
    }
}

/// One proposal; equal observations give equal proposals.
///
/// # Errors
/// [`Class::Usage`] where there is no recipe, or nothing in it may be turned. An exhausted space is an answer ([`Class::Agent`]), not an error.
pub fn search(observation: &Observation) -> Result<Proposed> {
    let text = observation.files.get(&observation.recipe_path).ok_or_else(|| {
        Failure::new(Class::Usage, format!("The search may not edit {}.", observation.recipe_path))
            .hint("Let the goal's `edit` cover the recipe, or choose another proposer.")
    })?;
    let recipe = parse(&observation.recipe_path, text)?;
    let space = Space::of(&observation.recipe_schema, &recipe, &observation.resolved);
    if space.dimensions.is_empty() {
        return Err(Failure::new(Class::Usage, "Nothing in the recipe's schema is marked as tunable.")
            .hint("The built-in search turns recipes of Hone's own trainer. Choose another proposer for a command."));
    }
    let search = Searching { observation, space: &space, tried: tried(observation) };
    let answer =
        search.diagnosed().or_else(|| search.further()).or_else(|| search.combined()).or_else(|| search.drawn());
    let answer = answer.ok_or_else(|| Failure::new(Class::Agent, "The search finds nothing that was not tried."));
    Ok(Proposed { answer, transcript: vec![], usage: Usage::default() })
}

/// What earlier rounds set, whether it ran or was refused: one set of (key, value) a round.
fn tried(observation: &Observation) -> BTreeSet<BTreeSet<(String, String)>> {
    let mut all = BTreeSet::new();
    for past in &observation.history {
        let changed = past.changes.iter().filter_map(|c| Some((c.key.clone()?, show(c.to.as_ref()?))));
        all.insert(changed.collect());
        let edits = past.proposal.iter().flat_map(|p| &p.edits);
        let set = edits.filter_map(|edit| match edit {
            Edit::Set { key, value, .. } => Some((key.clone(), show(value))),
            _ => None,
        });
        all.insert(set.collect());
    }
    all
}

struct Searching<'a> {
    observation: &'a Observation,
    space: &'a Space,
    tried: BTreeSet<BTreeSet<(String, String)>>,
}

impl Searching<'_> {
    /// A proposal, where the remedy is new and the recipe can take it.
    fn proposal(&self, remedy: &Remedy, source: &str, hypothesis: String) -> Option<Proposal> {
        let now = |key: &str| self.space.known.get(key).or_else(|| self.space.dimension(key)?.current.as_ref());
        let moved = remedy.iter().any(|(key, value)| now(key).is_none_or(|now| !same(now, value)));
        let set: BTreeSet<_> = remedy.iter().map(|(key, value)| (key.clone(), show(value))).collect();
        if !moved || self.tried.contains(&set) {
            return None;
        }
        let file = &self.observation.recipe_path;
        let edits: Vec<Edit> = remedy
            .iter()
            .map(|(key, value)| Edit::Set { file: file.clone(), key: key.clone(), value: value.clone() })
            .collect();
        apply_edits(&self.observation.files, &edits).ok()?;
        let metric = &self.observation.metric;
        // What is worth keeping is what is hoped for; what earlier rounds of the kind gave corrects the hope.
        let family = source.split('/').take(2).collect::<Vec<_>>().join("/");
        let predicted = forecast(&self.observation.history, &family, 2.0 * metric.min_effect * metric.direction.sign());
        let title = match &remedy[..] {
            [(key, value)] => format!("{key} {}", show(value)),
            more => more
                .iter()
                .map(|(k, v)| format!("{} {}", k.rsplit('.').next().unwrap_or(k), show(v)))
                .collect::<Vec<_>>()
                .join(", "),
        };
        Some(Proposal { title, hypothesis, edits, predicted_effect: predicted, differs: None, source: source.into() })
    }

    /// The most urgent finding's first remedy, one on a key that no round has turned before one that turns it again: what another key
    /// can do is known less.
    fn diagnosed(&self) -> Option<Proposal> {
        let turned: BTreeSet<&String> = self.tried.iter().flatten().map(|(key, _)| key).collect();
        diagnose(self.observation, self.space).iter().find_map(|finding| {
            let source = format!("search/rule/{}", finding.rule);
            let again = |remedy: &&Remedy| remedy.iter().any(|(key, _)| turned.contains(key));
            let (again, fresh): (Vec<_>, Vec<_>) = finding.remedies.iter().partition(again);
            let hypothesis = |remedy| finding.hypothesis(self.space, remedy);
            fresh.into_iter().chain(again).find_map(|remedy| self.proposal(remedy, &source, hypothesis(remedy)))
        })
    }

    fn gain(&self, past: &Past) -> Option<f64> {
        past.effect.map(|effect| effect * self.observation.metric.direction.sign())
    }

    /// The newest kept change, as far again in the same direction, or half as far.
    fn further(&self) -> Option<Proposal> {
        let kept = self.observation.history.iter().rev().find(|past| past.decision == Some(Decision::Keep))?;
        let step = |power: f64| -> Option<Remedy> {
            let remedy: Remedy = kept
                .changes
                .iter()
                .filter_map(|change| {
                    let dimension = self.space.dimension(change.key.as_deref()?)?;
                    let (from, to) = (change.from.as_ref()?.as_f64()?, change.to.as_ref()?.as_f64()?);
                    let stands = same(dimension.current.as_ref()?, change.to.as_ref()?);
                    let new = dimension.scaled((to / from).powf(power)).filter(|_| stands && from != 0.0)?;
                    Some((dimension.key.clone(), new))
                })
                .collect();
            (!remedy.is_empty()).then_some(remedy)
        };
        let gain = kept.effect.unwrap_or_default();
        [1.0, 0.5].into_iter().filter_map(step).find_map(|remedy| {
            let change = describe(self.space, &remedy);
            let hypothesis =
                format!("Round {} changed the metric by {gain:+.3} and was kept; the optimum may lie further on. Therefore {change}.", kept.round);
            self.proposal(&remedy, "search/further", hypothesis)
        })
    }

    /// The two best changes that helped without being kept, together: each may have been too small to confirm.
    fn combined(&self) -> Option<Proposal> {
        let worth = 0.5 * self.observation.metric.min_effect;
        let mut good: Vec<(f64, &Past, Remedy)> = self
            .observation
            .history
            .iter()
            .filter(|past| {
                past.decision.is_none() && matches!(past.verdict, Some(Verdict::Undecided | Verdict::Better))
            })
            .filter_map(|past| {
                let gain = self.gain(past).filter(|gain| *gain >= worth)?;
                let remedy = past
                    .changes
                    .iter()
                    .map(|c| Some((self.space.dimension(c.key.as_deref()?)?.key.clone(), c.to.clone()?)));
                Some((gain, past, remedy.collect::<Option<Remedy>>()?))
            })
            .collect();
        good.sort_by(|a, b| b.0.total_cmp(&a.0));
        good.iter().enumerate().find_map(|(i, (gain, past, remedy))| {
            good[i + 1..].iter().find_map(|(other_gain, other, more)| {
                let disjoint = more.iter().all(|(key, _)| remedy.iter().all(|(k, _)| k != key));
                let both: Remedy = remedy.iter().chain(more).cloned().collect();
                let change = describe(self.space, &both);
                let hypothesis = format!(
                    "Rounds {} and {} gained {gain:.3} and {other_gain:.3}, each too little to confirm; together they may be enough. Therefore {change}.",
                    past.round, other.round
                );
                self.proposal(&both, "search/combined", hypothesis).filter(|_| disjoint)
            })
        })
    }

    /// One to three keys, drawn: where a key has been tried often enough, from TPE; else near where it stands.
    fn drawn(&self) -> Option<Proposal> {
        (0..TRIES).find_map(|attempt| {
            let mut rng = draws(self.observation.seed, "search", u64::from(self.observation.round), attempt);
            let many = [1, 1, 1, 2, 2, 3][rng.random_range(0..6)];
            let mut remedy: Remedy = Vec::new();
            let mut grounds = Vec::new();
            for _ in 0..many {
                let dimension = self.pick(&mut rng);
                if remedy.iter().any(|(key, _)| *key == dimension.key) {
                    continue;
                }
                let trials = self.trials(dimension);
                let (value, ground) = match self.ask(dimension, &trials, &mut rng) {
                    Some(value) => (value, format!("TPE over {} rounds", rounds(&trials))),
                    None => (near(dimension, attempt, &mut rng), "a step from where it stands".to_string()),
                };
                let stays = dimension.current.as_ref().is_some_and(|now| same(now, &value));
                if !stays {
                    grounds.push(format!("{} by {ground}", dimension.name()));
                    remedy.push((dimension.key.clone(), value));
                }
            }
            let hypothesis = || {
                let change = describe(self.space, &remedy);
                format!(
                    "The curves show no sign with an untried remedy; drawn: {}. Therefore {change}.",
                    grounds.join(", ")
                )
            };
            if remedy.is_empty() { None } else { self.proposal(&remedy, "search/tpe", hypothesis()) }
        })
    }

    /// A key, drawn by weight; what has shown effects (either way) is drawn more often, as there is something to find.
    fn pick(&self, rng: &mut ChaCha8Rng) -> &Dimension {
        let weight = |d: &Dimension| {
            let named = WEIGHT.iter().find(|(name, _)| *name == d.name()).map_or(1.0, |(_, weight)| *weight);
            let prior = if d.key.starts_with("model.") { MODEL_WEIGHT } else { named };
            let trials = self.trials(d);
            let best = trials.iter().map(|(_, gain)| *gain).fold(0.0, f64::max);
            prior * (1.0 + (best / self.observation.metric.min_effect).min(4.0)) / (1.0 + rounds(&trials) as f64)
        };
        let weights: Vec<f64> = self.space.dimensions.iter().map(weight).collect();
        let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
        let at = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        &self.space.dimensions[at.unwrap_or(weights.len() - 1)]
    }

    /// Every (value, gain) of a key in earlier rounds. A change's old value counts as the zero that it was compared with; a run that
    /// diverged as the worst that was seen, and at least two effects worth keeping below.
    fn trials(&self, dimension: &Dimension) -> Vec<(Value, f64)> {
        let worst = self
            .observation
            .history
            .iter()
            .filter_map(|past| self.gain(past))
            .fold(-2.0 * self.observation.metric.min_effect, f64::min);
        let mut trials = Vec::new();
        for past in &self.observation.history {
            let gain = match past.verdict {
                Some(Verdict::Invalid) => Some(worst),
                _ => self.gain(past),
            };
            let change = past.changes.iter().find(|c| c.key.as_deref() == Some(&dimension.key));
            if let (Some(gain), Some(change)) = (gain, change) {
                trials.extend(change.from.clone().map(|from| (from, 0.0)));
                trials.extend(change.to.clone().map(|to| (to, gain)));
            }
        }
        trials
    }

    /// TPE's next value of a key; None where it has seen too little.
    fn ask(&self, dimension: &Dimension, trials: &[(Value, f64)], rng: &mut ChaCha8Rng) -> Option<Value> {
        if trials.len() < TRIALS {
            return None;
        }
        let builder = {
            let mut builder = tpe::TpeOptimizerBuilder::new();
            // The crate's own tenth would be a single trial for a long time.
            builder.gamma(0.25);
            builder
        };
        let (estimator, range, scale) = match &dimension.domain {
            Domain::Range { .. } => (tpe::parzen_estimator(), tpe::range(0.0, 1.0 + 1e-9).ok()?, 1.0),
            Domain::Choice(choices) => {
                (tpe::histogram_estimator(), tpe::categorical_range(choices.len()).ok()?, choices.len() as f64)
            }
        };
        let mut optimizer = builder.build(estimator, range).ok()?;
        for (value, gain) in trials {
            // It minimises.
            if let Some(position) = dimension.position(value) {
                optimizer.tell(position * scale, -gain).ok()?;
            }
        }
        let asked = optimizer.ask(rng).ok()?;
        // A category comes as its index.
        Some(dimension.value(if scale > 1.0 { (asked.floor() + 0.5) / scale } else { asked }))
    }
}

/// Each round of a key's trials is two of them: where it came from and where it went.
fn rounds(trials: &[(Value, f64)]) -> usize {
    trials.len().div_ceil(2)
}

/// A value near the present one: a fifth of the range away, more with every fruitless attempt; another choice.
fn near(dimension: &Dimension, attempt: u64, rng: &mut ChaCha8Rng) -> Value {
    let now = dimension.current.as_ref().and_then(|value| dimension.position(value)).unwrap_or(0.5);
    match &dimension.domain {
        Domain::Choice(choices) => choices[rng.random_range(0..choices.len())].clone(),
        Domain::Range { .. } => {
            let width = 0.2 * (1.0 + attempt as f64 / 50.0);
            let step = width * (0.5 + rng.random::<f64>()) * if rng.random::<bool>() { 1.0 } else { -1.0 };
            let there = now + step;
            // Reflected at the ends, so that a key at its bound still moves.
            dimension.value(if there > 1.0 { 2.0 - there } else { there.abs() })
        }
    }
}
