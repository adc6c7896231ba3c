//! An observation of a small campaign.

use std::collections::BTreeMap;

use hone_agent::digest::Series;
use hone_agent::edit::{apply_edits, changes};
use hone_agent::judge::{Direction, Verdict};
use hone_agent::proposal::*;
use serde_json::{Value, json};

pub const RECIPE: &str = "\
model: {preset: hybrid-tiny}
optimizer:
  lr: 1e-3   # the usual
  clip: 1.0
stages:
  - sft: {task: addition, digits: 2}
  - rl: {task: addition, digits: 2, group: 8}
";

/// A schema in the manner of the trainer's.
pub fn schema() -> Value {
    let log = |low: f64, high: f64| json!({"low": low, "high": high, "scale": "log"});
    let number = |low, high, default: Value| json!({"type": "number", "default": default, "x-tunable": log(low, high)});
    let optional = |low, high| json!({"type": ["number", "null"], "x-tunable": log(low, high)});
    let choice = |choices: Value, default: Value| json!({"default": default, "x-tunable": {"choices": choices, "scale": "choice"}});
    json!({
        "type": "object",
        "properties": {
            "model": {"type": "object", "properties": {
                "preset": {"type": ["string", "null"]},
                "layers": {"type": ["integer", "null"], "x-tunable": {"low": 2, "high": 12, "scale": "linear"}},
            }},
            "optimizer": {"$ref": "#/$defs/Optimizer"},
            "stages": {"type": "array", "items": {"$ref": "#/$defs/Stage"}},
        },
        "$defs": {
            "Optimizer": {"type": "object", "properties": {
                "lr": number(1e-4, 2e-2, json!(1e-3)),
                "betas": choice(json!([[0.9, 0.95], [0.9, 0.999]]), json!([0.9, 0.999])),
                "eps": choice(json!([1e-15, 1e-8]), json!(1e-8)),
                "clip": number(0.1, 10.0, json!(1.0)),
                "balance": number(1e-4, 0.1, json!(0.001)),
            }},
            "Stage": {"oneOf": [
                {"type": "object", "properties": {"sft": {"$ref": "#/$defs/Sft"}}, "required": ["sft"], "additionalProperties": false},
                {"type": "object", "properties": {"rl": {"$ref": "#/$defs/Rl"}}, "required": ["rl"], "additionalProperties": false},
            ]},
            "Sft": {"type": "object", "properties": {
                "task": {"type": "string"},
                "lr": optional(1e-4, 2e-2),
                "batch": {"type": "integer", "default": 1024, "x-tunable": log(256.0, 8192.0)},
                "share": number(0.1, 10.0, json!(1.0)),
            }},
            "Rl": {"type": "object", "properties": {
                "task": {"type": "string"},
                "algorithm": choice(json!(["cispo", "grpo"]), json!("grpo")),
                "ratio_cap": optional(1.1, 10.0),
                "normaliser": {"type": ["string", "null"], "x-tunable": {"choices": ["prompt-average", "sequence-mean"], "scale": "choice"}},
                "group": {"type": "integer", "default": 8, "x-tunable": log(4.0, 32.0)},
                "prompts": {"type": "integer", "default": 32, "x-tunable": log(8.0, 128.0)},
                "temperature": {"type": "number", "default": 1.0, "x-tunable": {"low": 0.6, "high": 1.4, "scale": "linear"}},
                "max_tokens": {"type": "integer", "default": 32},
                "dynamic_sampling": choice(json!([true, false]), json!(true)),
                "resample": choice(json!([0, 1, 3]), json!(0)),
                "overlong": {"type": "string", "default": "keep"},
                "lr": optional(3e-5, 1e-2),
                "share": number(0.1, 10.0, json!(1.0)),
            }},
        },
    })
}

/// A curve that ends at `mean`, rising by `rise` over its last quarter, with little noise.
pub fn curve(first: f64, mean: f64, rise: f64) -> Series {
    let (min, max) = (first.min(mean), first.max(mean));
    Series {
        n: 80,
        nonfinite: 0,
        steps: [1, 80],
        first,
        last: mean + rise / 2.0,
        min,
        max,
        tail_mean: mean,
        tail_rise: rise,
        tail_noise: 0.01 * rise.abs().max(1e-3),
    }
}

/// Round 1, with healthy curves.
pub fn observation() -> Observation {
    let healthy = [
        ("stages.0/train/loss", curve(2.0, 0.5, -0.001)),
        ("stages.0/train/grad_norm", curve(1.0, 0.5, 0.0)),
        ("stages.0/train/grad_under_eps", curve(0.0, 0.0, 0.0)),
        ("stages.0/train/expert_max_load", curve(1.5, 1.3, 0.0)),
        ("stages.1/train/loss", curve(0.1, -0.2, 0.0)),
        ("stages.1/train/grad_norm", curve(1.0, 0.5, 0.0)),
        ("stages.1/rl/reward", curve(0.3, 0.6, 0.0)),
        ("stages.1/rl/zero_std_share", curve(0.3, 0.3, 0.0)),
        ("stages.1/rl/entropy", curve(0.8, 0.4, 0.0)),
        ("stages.1/rl/clipped_share", curve(0.0, 0.01, 0.0)),
        ("stages.1/rl/truncated_share", curve(0.0, 0.01, 0.0)),
        ("stages.1/rl/length_right", curve(4.0, 4.0, 0.0)),
        ("stages.1/rl/length_wrong", curve(4.0, 4.0, 0.0)),
    ];
    Observation {
        goal: "raise pass@1 on two-digit addition".into(),
        metric: Metric { name: "add/pass@1".into(), direction: Direction::Maximize, min_effect: 0.03 },
        campaign: "c1".into(),
        seed: 7,
        round: 1,
        rounds_left: 8,
        incumbent: Incumbent {
            commit: "a".repeat(40),
            scores: vec![0.5, 0.52, 0.48],
            mean: 0.5,
            interval: [0.45, 0.55],
        },
        edit: vec!["recipe/**".into(), "scaffold/**".into()],
        files: BTreeMap::from([
            ("recipe/recipe.yaml".to_string(), RECIPE.to_string()),
            ("scaffold/prompt.txt".to_string(), "Add the numbers.\n".to_string()),
        ]),
        prompts: BTreeMap::new(),
        recipe_path: "recipe/recipe.yaml".into(),
        recipe_schema: schema(),
        resolved: json!({"model": {"layers": 4}}),
        history: vec![],
        curves: healthy.into_iter().map(|(name, series)| (name.to_string(), series)).collect(),
        alarms: vec![],
        failed_samples: vec![FailedSample { prompt: "12+34=".into(), expected: "46".into(), got: "47".into() }],
        notes: vec![],
        failed_run: None,
    }
}

/// Plays a round: the proposal measured at `gain`; kept when it is worth it.
pub fn play(observation: &mut Observation, proposal: Proposal, gain: f64) {
    let mut after = observation.files.clone();
    for (file, text) in apply_edits(&observation.files, &proposal.edits).unwrap() {
        match text {
            Some(text) => drop(after.insert(file, text)),
            None => drop(after.remove(&file)),
        }
    }
    let keep = gain >= observation.metric.min_effect;
    observation.history.push(Past {
        round: observation.round,
        changes: changes(&observation.files, &after),
        proposal: Some(proposal),
        verdict: Some(if keep { Verdict::Better } else { Verdict::Undecided }),
        effect: Some(gain),
        interval: Some([gain - 0.01, gain + 0.01]),
        refusal: None,
        decision: keep.then_some(Decision::Keep),
        flags: vec![],
    });
    if keep {
        observation.files = after;
    }
    observation.round += 1;
}
