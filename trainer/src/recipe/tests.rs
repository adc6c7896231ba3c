//! Recipes as people write them: what is read, what is refused and with which words.

use super::*;

fn parse(text: &str) -> Result<Recipe> {
    Recipe::parse(text, "recipe.yaml", &[])
}

fn refused(text: &str) -> String {
    let failure = parse(text).unwrap_err();
    assert_eq!(failure.class, Class::Usage);
    assert!(failure.message.ends_with('.') && failure.hint.is_some() && failure.at.is_some(), "{failure:?}");
    failure.to_string()
}

#[test]
fn a_stage_alone_is_the_vetted_setting() {
    let recipe = parse("stages:\n  - sft: {}\n  - rl: {}\n").unwrap();
    assert_eq!(recipe.stages, [Stage::Sft(Sft::default()), Stage::Rl(Rl::default())]);
    assert_eq!(parse("{}").unwrap(), Recipe::default());
    assert_eq!(recipe.compute.resolved().tokens, Some(Count(1_000_000)));
}

#[test]
fn a_whole_recipe_reads() {
    let recipe = parse(
        "model: {preset: hybrid-tiny}\ntokenizer: bytes\ncompute: {tokens: 3M}\n\
         optimizer: {lr: 1e-3, betas: [0.9, 0.95], eps: 1e-15, weight_decay: 0.1, clip: 1.0}\n\
         stages:\n  - sft: {task: addition, digits: 2, examples: 20000}\n  \
         - rl: {task: addition, digits: 2, algorithm: cispo, ratio_cap: 5.0, prompts: 32, group: 8, temperature: 1.0}\n",
    )
    .unwrap();
    assert_eq!(recipe.compute.tokens, Some(Count(3_000_000)));
    assert_eq!(recipe.stages[0].task().digits, Some(2));
    let again: Recipe = serde_json::from_value(serde_json::to_value(&recipe).unwrap()).unwrap();
    assert_eq!(again, recipe);
}

#[test]
fn unknown_keys_name_the_nearest() {
    assert!(refused("stages:\n  - rl: {ratio_cpa: 5}\n").contains("did you mean `ratio_cap`?"));
    assert!(refused("stages:\n  - rl: {kl: 0.1}\n").contains("Unknown key `kl`."));
    assert!(refused("stages:\n  - rl: {top_p: 0.9}\n").contains("Unknown key `top_p`."));
    assert!(refused("optimiser: {lr: 1}\n").contains("`optimizer`"));
    let failure = parse("stages:\n  - sft: {exmples: 3}\n").unwrap_err();
    assert_eq!(failure.at.as_deref(), Some("recipe.yaml:2:11"));
}

#[test]
fn conflicting_knobs_are_refused_with_a_reason() {
    for (keys, reason) in [
        ("ratio_cap: 0.2", "ratio_cap is absolute"),
        ("ratio_floor: 1.5", "ratio_floor is absolute"),
        ("temperature: 0", "explores nothing"),
        ("group: 1", "compares completions"),
        ("minibatches: 64", "whole groups"),
        ("dynamic_sampling: false, resample: 2", "none is dropped"),
        ("repetition: 0", "halt at once"),
        ("share: 0", "relative"),
        ("lr: -1", "positive"),
        ("epochs: 0", "at least 1"),
    ] {
        let text = refused(&format!("stages:\n  - rl: {{{keys}}}\n"));
        assert!(text.contains(reason) && text.contains("stages.0.rl"), "{keys}: {text}");
    }
    for (text, reason) in [
        ("stages: []", "no stages"),
        ("compute: {tokens: 0}", "limit is 0"),
        ("optimizer: {betas: [0.9, 1.0]}", "betas"),
        ("optimizer: {lr: 0}", "lr"),
        ("model: {from: x, preset: hybrid-tiny}", "shape"),
    ] {
        assert!(refused(text).contains(reason), "{text}");
    }
}

#[test]
fn bands_and_normalisers_default_to_the_algorithms_own() {
    let rl = |keys: &str| match parse(&format!("stages:\n  - rl: {{{keys}}}\n")).unwrap().stages.remove(0) {
        Stage::Rl(rl) => rl,
        Stage::Sft(_) => unreachable!("written as rl"),
    };
    assert_eq!(rl("").band(), Band { floor: 0.0, cap: 5.0 });
    assert_eq!(rl("").normaliser(), Normaliser::PromptAverage);
    assert_eq!(rl("algorithm: grpo").band(), Band { floor: 0.8, cap: 1.2 });
    assert_eq!(rl("algorithm: grpo, ratio_cap: 1.28").band(), Band { floor: 0.8, cap: 1.28 });
    assert_eq!(rl("algorithm: grpo").normaliser(), Normaliser::SequenceMean);
}

#[test]
fn overrides_reach_any_key() {
    let text = "compute: {tokens: 1M}\nstages:\n  - sft: {task: addition}\n";
    let set = |sets: &[&str]| Recipe::parse(text, "r.yaml", &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>());
    let recipe =
        set(&["stages.0.sft.lr=3e-3", "compute.tokens=2M", "optimizer.betas=[0.8, 0.9]", "model.preset=hybrid-nano"])
            .unwrap();
    assert_eq!(recipe.stages[0].lr(&recipe.optimizer), 3e-3);
    assert_eq!((recipe.compute.tokens, recipe.optimizer.betas), (Some(Count(2_000_000)), [0.8, 0.9]));
    for (bad, reason) in [
        ("stages.0.sft.lrr=1", "Unknown key `lrr`."),
        ("stages.1.sft.lr=1", "no place in a list of 1"),
        ("lr", "KEY=VALUE"),
        ("compute.tokens.x=1", "which has no keys"),
        ("optimizer.lr=0", "not a positive number"),
    ] {
        let failure = set(&[bad]).unwrap_err();
        assert!(failure.to_string().contains(reason), "{bad}: {failure}");
    }
}

#[test]
fn tunable_keys_say_their_range() {
    let schema = schema();
    let lr = &schema["$defs"]["Sft"]["properties"]["lr"]["x-tunable"];
    assert_eq!(lr["scale"], "log");
    assert!(lr["low"].as_f64() < lr["high"].as_f64());
    let mut marked = 0;
    fn walk(value: &Value, marked: &mut usize) {
        if let Some(mark) = value.get("x-tunable") {
            *marked += 1;
            let ranged = mark["low"].is_number()
                && mark["high"].is_number()
                && (mark["scale"] == "log" || mark["scale"] == "linear");
            assert!(ranged || (mark["scale"] == "choice" && mark["choices"].is_array()), "{mark}");
        }
        match value {
            Value::Object(map) => map.values().for_each(|v| walk(v, marked)),
            Value::Array(items) => items.iter().for_each(|v| walk(v, marked)),
            _ => {}
        }
    }
    walk(&schema, &mut marked);
    assert!(marked > 20, "{marked}");
}

#[test]
fn an_estimate_prices_each_stage() {
    let root = Path::new(".");
    let of = |text: &str| estimate(&parse(text).unwrap(), root).unwrap();
    let sft = of("model: {preset: hybrid-nano}\ncompute: {tokens: 1M}\n");
    assert_eq!(sft.tokens, Some(1_000_000));
    assert!(sft.params > 50_000);
    let rl = of("model: {preset: hybrid-nano}\ncompute: {tokens: 1M}\nstages: [rl: {}]\n");
    assert!((rl.flops.unwrap() / sft.flops.unwrap() - 2.0 / 3.0).abs() < 1e-9);
    let back = of(&format!("model: {{preset: hybrid-nano}}\ncompute: {{flops: {}}}\n", sft.flops.unwrap() as u64));
    assert!(back.tokens.unwrap().abs_diff(1_000_000) <= 1);
    assert_eq!(of("compute: {seconds: 5s}\n").tokens, None);
}
