//! The built-in search: its rules, its novelty, its determinism, and that it finds what is to be found.

use std::collections::BTreeSet;

use hone_agent::edit::{Edit, at, parse};
use hone_agent::proposal::{Observation, Proposal};
use hone_agent::search::search;
use hone_runs::Class;
use serde_json::{Value, json};

use crate::fixture::*;

fn propose(observation: &Observation) -> Proposal {
    search(observation).unwrap().answer.unwrap()
}

fn sets(proposal: &Proposal) -> Vec<(&str, &Value)> {
    fn of(edit: &Edit) -> (&str, &Value) {
        match edit {
            Edit::Set { key, value, .. } => (key.as_str(), value),
            other => panic!("{other:?}"),
        }
    }
    proposal.edits.iter().map(of).collect()
}

/// Each injected sign, the rule that must fire first, its first edit, and a number that the hypothesis must show.
#[test]
fn rules_fire_on_their_signs() {
    let nan = hone_agent::digest::Series { nonfinite: 3, ..curve(2.0, 0.5, 0.0) };
    let cases = [
        (vec![("stages.0/train/loss", nan)], "diverging", "stages.0.sft.lr", json!(0.00033), "not finite at 3 steps"),
        (vec![("stages.0/train/loss", curve(2.0, 0.9, 0.3))], "diverging", "stages.0.sft.lr", json!(0.00033), "0.900"),
        (vec![("stages.1/rl/reward", curve(0.8, 0.4, -0.1))], "diverging", "stages.1.rl.lr", json!(0.00033), "0.400"),
        (
            vec![("stages.1/train/grad_under_eps", curve(0.1, 0.4, 0.0))],
            "under-eps",
            "optimizer.eps",
            json!(1e-15),
            "40%",
        ),
        (
            vec![("stages.0/train/expert_max_load", curve(1.0, 3.5, 0.0))],
            "expert-load",
            "optimizer.balance",
            json!(0.01),
            "3.5",
        ),
        (
            vec![("stages.1/rl/zero_std_share", curve(0.5, 0.9, 0.0)), ("stages.1/rl/reward", curve(0.0, 0.05, 0.0))],
            "groups-equal",
            "stages.0.sft.share",
            json!(2.0),
            "90%",
        ),
        (
            vec![("stages.1/rl/zero_std_share", curve(0.5, 0.9, 0.0)), ("stages.1/rl/reward", curve(0.5, 0.95, 0.0))],
            "groups-equal",
            "stages.1.rl.temperature",
            json!(1.2),
            "too easy",
        ),
        (
            vec![("stages.1/rl/entropy", curve(0.8, 0.01, 0.0))],
            "entropy-collapse",
            "stages.1.rl.lr",
            json!(0.0005),
            "0.010",
        ),
        (
            vec![("stages.1/rl/clipped_share", curve(0.0, 0.3, 0.0))],
            "clipped-tokens",
            "stages.1.rl.algorithm",
            json!("cispo"),
            "30%",
        ),
        (
            vec![("stages.1/rl/truncated_share", curve(0.0, 0.2, 0.0))],
            "truncated",
            "stages.1.rl.max_tokens",
            json!(48),
            "20%",
        ),
        (
            vec![
                ("stages.1/rl/length_wrong", curve(4.0, 9.0, 0.0)),
                ("stages.1/rl/truncated_share", curve(0.0, 0.1, 0.0)),
            ],
            "long-negatives",
            "stages.1.rl.normaliser",
            json!("sequence-mean"),
            "9.0 tokens",
        ),
        (
            vec![("stages.0/train/loss", curve(2.0, 0.5, -0.1))],
            "still-improving",
            "stages.0.sft.batch",
            json!(512),
            "0.100",
        ),
        (
            vec![("stages.1/rl/reward", curve(0.1, 0.4, 0.1))],
            "still-improving",
            "stages.1.rl.lr",
            json!(0.002),
            "0.100",
        ),
    ];
    for (curves, rule, key, value, number) in cases {
        let mut observation = observation();
        observation.curves.extend(curves.into_iter().map(|(name, series)| (name.to_string(), series)));
        let proposal = propose(&observation);
        assert_eq!(proposal.source, format!("search/rule/{rule}"), "{}", proposal.hypothesis);
        assert_eq!(sets(&proposal)[0], (key, &value), "{rule}");
        assert!(proposal.hypothesis.contains(number), "{}", proposal.hypothesis);
        assert!(proposal.hypothesis.ends_with('.') && proposal.hypothesis.contains(key), "{}", proposal.hypothesis);
    }
}

#[test]
fn healthy_curves_call_for_no_remedy() {
    assert_eq!(propose(&observation()).source, "search/tpe");
}

#[test]
fn noise_is_not_taken_for_a_trend() {
    let mut observation = observation();
    let noisy = hone_agent::digest::Series { tail_noise: 0.2, ..curve(2.0, 0.5, -0.1) };
    observation.curves.insert("stages.0/train/loss".into(), noisy);
    assert_eq!(propose(&observation).source, "search/tpe");
}

#[test]
fn a_rule_that_failed_offers_its_next_remedy() {
    let mut observation = observation();
    observation.curves.insert("stages.0/train/loss".into(), curve(2.0, 0.5, -0.1));
    let mut keys = Vec::new();
    for _ in 0..5 {
        let proposal = propose(&observation);
        assert_eq!(proposal.source, "search/rule/still-improving");
        keys.push((sets(&proposal)[0].0.to_string(), sets(&proposal)[0].1.clone()));
        play(&mut observation, proposal, 0.0);
    }
    let expected = [
        ("batch", json!(512)),
        ("lr", json!(0.002)),
        ("share", json!(2.0)),
        ("lr", json!(0.004)),
        ("batch", json!(256)),
    ];
    assert_eq!(keys, expected.map(|(name, value)| (format!("stages.0.sft.{name}"), value)));
    assert_ne!(propose(&observation).source, "search/rule/still-improving");
}

#[test]
fn a_model_too_large_for_its_operations_is_made_smaller() {
    let mut observation = observation();
    observation.curves.insert("stages.0/train/loss".into(), curve(2.0, 0.5, -0.1));
    observation.files.insert("recipe/recipe.yaml".into(), format!("{RECIPE}compute: {{flops: 120G}}\n"));
    observation.recipe_schema["properties"]["compute"] =
        json!({"properties": {"flops": {"type": ["string", "integer"]}}});
    let proposal = propose(&observation);
    assert_eq!(proposal.source, "search/rule/too-large");
    assert_eq!(sets(&proposal), [("model.layers", &json!(2))]);
    assert!(proposal.hypothesis.ends_with("model.layers from 4 to 2."), "{}", proposal.hypothesis);
    play(&mut observation, proposal, 0.0);
    assert_eq!(propose(&observation).source, "search/rule/still-improving");
    observation.resolved = Value::Null;
    observation.history.clear();
    assert_eq!(propose(&observation).source, "search/rule/still-improving", "of an unknown size there is no half");
}

#[test]
fn what_was_kept_is_taken_further() {
    let mut observation = observation();
    let set = |key: &str, value: Value| Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value };
    let first = propose(&observation);
    play(&mut observation, Proposal { edits: vec![set("optimizer.lr", json!(0.002))], ..first.clone() }, 0.10);
    let proposal = propose(&observation);
    assert_eq!((proposal.source.as_str(), sets(&proposal)), ("search/further", vec![("optimizer.lr", &json!(0.004))]));
    assert!(
        proposal.hypothesis.contains("Round 1") && proposal.hypothesis.contains("from 0.002 to 0.004"),
        "{}",
        proposal.hypothesis
    );
    play(&mut observation, proposal, -0.05);
    assert_eq!(sets(&propose(&observation)), [("optimizer.lr", &json!(0.0028))]);
}

#[test]
fn two_small_gains_are_tried_together() {
    let mut observation = observation();
    let set = |key: &str, value: Value| Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value };
    let first = propose(&observation);
    play(&mut observation, Proposal { edits: vec![set("optimizer.clip", json!(0.3))], ..first.clone() }, 0.02);
    play(&mut observation, Proposal { edits: vec![set("stages.1.rl.group", json!(16))], ..first }, 0.025);
    let proposal = propose(&observation);
    assert_eq!(proposal.source, "search/combined");
    assert_eq!(sets(&proposal), [("stages.1.rl.group", &json!(16)), ("optimizer.clip", &json!(0.3))]);
}

#[test]
fn the_search_is_a_function_of_the_observation() {
    let (mut a, mut b, mut other) = (observation(), observation(), Observation { seed: 8, ..observation() });
    let mut differs = false;
    for _ in 0..12 {
        let (p, q, r) = (propose(&a), propose(&b), propose(&other));
        assert_eq!(p, q);
        differs |= p != r;
        play(&mut a, p, 0.01);
        play(&mut b, q, 0.01);
        play(&mut other, r, 0.01);
    }
    assert!(differs, "another seed searches elsewhere");
}

#[test]
fn nothing_is_proposed_twice_and_everything_applies() {
    let mut observation = observation();
    let mut seen = BTreeSet::new();
    for round in 0..60 {
        let proposal = propose(&observation);
        let edits: BTreeSet<String> = sets(&proposal).into_iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert!((1..=3).contains(&edits.len()) && seen.insert(edits.clone()), "round {round}: {edits:?}");
        assert!(proposal.predicted_effect.is_finite() && !proposal.title.is_empty());
        play(&mut observation, proposal, 0.001 * f64::from(round % 7) - 0.003);
    }
}

#[test]
fn refused_proposals_are_not_repeated() {
    let mut observation = observation();
    let first = propose(&observation);
    play(&mut observation, first.clone(), 0.0);
    let past = observation.history.last_mut().unwrap();
    (past.changes, past.effect, past.verdict, past.refusal) = (vec![], None, None, Some("the dry run failed".into()));
    observation.round = 1;
    assert_ne!(propose(&observation).edits, first.edits);
}

/// On a smooth landscape with a fifth of its width as noise the incumbent climbs most of the way in thirty rounds.
#[test]
fn the_search_climbs() {
    let height = |observation: &Observation| {
        let recipe = parse("r.yaml", &observation.files["recipe/recipe.yaml"]).unwrap();
        let number = |key: &str, default: f64| at(&recipe, key).and_then(Value::as_f64).unwrap_or(default);
        let lr = number("stages.0.sft.lr", number("optimizer.lr", 1e-3));
        let group = number("stages.1.rl.group", 8.0);
        0.9 - 0.15 * (lr / 8e-3).ln().powi(2) - 0.05 * (group / 20.0).ln().powi(2)
    };
    let mut ends = Vec::new();
    for seed in 0..5 {
        let mut observation = Observation { seed, ..observation() };
        let start = height(&observation);
        for _ in 0..30 {
            let proposal = propose(&observation);
            let mut trial = observation.clone();
            play(&mut trial, proposal.clone(), 1.0);
            let gain = height(&trial) - height(&observation);
            play(&mut observation, proposal, gain);
        }
        ends.push((height(&observation) - start) / (0.9 - start));
    }
    assert!(ends.iter().all(|share| *share > 0.6), "shares of the way climbed: {ends:?}");
}

#[test]
fn forecasts_learn_from_what_was_measured() {
    let mut observation = observation();
    let hope = propose(&observation).predicted_effect;
    assert_eq!(hope, 0.06);
    for _ in 0..6 {
        let proposal = propose(&observation);
        play(&mut observation, proposal, 0.0);
    }
    assert!(propose(&observation).predicted_effect < 0.5 * hope);
    observation.metric.direction = hone_agent::judge::Direction::Minimize;
    assert!(propose(&observation).predicted_effect < 0.0);
}

#[test]
fn a_space_without_marks_or_recipe_is_a_usage_failure() {
    let unmarked = Observation { recipe_schema: Value::Null, ..observation() };
    assert_eq!(search(&unmarked).unwrap_err().class, Class::Usage);
    let protected = Observation { recipe_path: "other.yaml".into(), ..observation() };
    assert_eq!(search(&protected).unwrap_err().class, Class::Usage);
}

#[test]
fn an_exhausted_space_is_an_answer() {
    let mut observation = observation();
    observation.recipe_schema = json!({"properties": {"optimizer": {"properties": {"clip": {
        "x-tunable": {"choices": [1.0, 2.0], "scale": "choice"}
    }}}}});
    let only = propose(&observation);
    play(&mut observation, only, 0.0);
    assert_eq!(search(&observation).unwrap().answer.unwrap_err().class, Class::Agent);
}
