//! The search space: what of a recipe may be turned, in which range, and where it stands now. Read from the recipe's JSON
//! Schema, whose `x-tunable` marks the trainer sets; not a list of our own. Which value to try is not decided here.
//!
//! A mark is `{"low": a, "high": b, "scale": "log" | "linear"}` or `{"choices": […], "scale": "choice"}`. A key that the
//! recipe does not name stands at its schema's default.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde_json::Value;

use crate::edit::at;

/// The values that a key may take.
#[derive(Clone, Debug, PartialEq)]
pub enum Domain {
    /// Numbers from `low` to `high`, both included.
    Range {
        /// Lowest.
        low: f64,
        /// Highest.
        high: f64,
        /// Equal steps are equal ratios.
        log: bool,
        /// Whole numbers only.
        integer: bool,
    },
    /// One of these.
    Choice(Vec<Value>),
}

/// One key that may be turned.
#[derive(Clone, Debug, PartialEq)]
pub struct Dimension {
    /// Dotted path in the recipe: `stages.0.sft.lr`.
    pub key: String,
    /// Its values.
    pub domain: Domain,
    /// Where it stands: the recipe's value, else the schema's default, else what a run made of it, else the value of the nearest key of
    /// the same name further up (a stage without `lr` has the optimizer's). None where nothing says.
    pub current: Option<Value>,
}

/// What may be turned, and what else is known of the recipe.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Space {
    /// The tunable keys, in the schema's order.
    pub dimensions: Vec<Dimension>,
    /// The value or default of every leaf of the recipe, tunable or not.
    pub known: BTreeMap<String, Value>,
}

impl Space {
    /// The space of a recipe; `resolved` is the recipe as a run filled it in (a preset's sizes), null where there is none. Marks that say
    /// nothing usable are passed over.
    pub fn of(schema: &Value, recipe: &Value, resolved: &Value) -> Self {
        let mut space = Self::default();
        walk(&mut Walk { space: &mut space, root: schema, resolved }, schema, Some(recipe), None, String::new());
        // Of a single stage, what it inherits is turned where it comes from, and its share of the compute is all of it.
        let single = recipe["stages"].as_array().is_none_or(|stages| stages.len() < 2);
        let mut dimensions = std::mem::take(&mut space.dimensions);
        dimensions.retain_mut(|dimension| {
            let in_stage = dimension.key.starts_with("stages.");
            let inherited = if dimension.current.is_none() { space.inherited(&dimension.key) } else { None };
            let idle = single && in_stage && (inherited.is_some() || dimension.name() == "share");
            dimension.current = dimension.current.take().or(inherited);
            !idle
        });
        space.dimensions = dimensions;
        space
    }

    /// The dimension of a key.
    pub fn dimension(&self, key: &str) -> Option<&Dimension> {
        self.dimensions.iter().find(|d| d.key == key)
    }

    /// The value of the same name that is nearest in the path from the root; an optimizer's for the stages.
    fn inherited(&self, key: &str) -> Option<Value> {
        let name = key.rsplit('.').next()?;
        let above = |k: &&String| k.rsplit('.').next() == Some(name) && k.split('.').count() < key.split('.').count();
        self.known.keys().filter(above).min_by_key(|k| k.len()).and_then(|k| self.known.get(k)).cloned()
    }
}

impl Dimension {
    /// The last part of the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    /// Where a value lies in [0, 1]; for choices (index + ½) / count. None where it is no value of this dimension.
    pub fn position(&self, value: &Value) -> Option<f64> {
        match &self.domain {
            Domain::Range { low, high, log, .. } => {
                let x = value.as_f64().filter(|x| x.is_finite() && (!log || *x > 0.0))?;
                let u = if *log { (x / low).ln() / (high / low).ln() } else { (x - low) / (high - low) };
                Some(u.clamp(0.0, 1.0))
            }
            Domain::Choice(choices) => {
                let index = choices.iter().position(|c| same(c, value))?;
                Some((index as f64 + 0.5) / choices.len() as f64)
            }
        }
    }

    /// The value at a position in [0, 1]: numbers to two significant digits, so that a diff reads well.
    pub fn value(&self, position: f64) -> Value {
        let u = position.clamp(0.0, 1.0);
        match &self.domain {
            Domain::Range { low, high, log, .. } => {
                self.number(two_digits(if *log { low * (high / low).powf(u) } else { low + (high - low) * u }))
            }
            Domain::Choice(choices) => choices[((u * choices.len() as f64) as usize).min(choices.len() - 1)].clone(),
        }
    }

    /// The current number times `factor`, within the range; None where it is no number or does not move.
    pub fn scaled(&self, factor: f64) -> Option<Value> {
        let Domain::Range { .. } = self.domain else { return None };
        let now = self.current.as_ref()?;
        let new = self.number(now.as_f64()? * factor);
        (!same(&new, now)).then_some(new)
    }

    /// The next smaller size: half of a number, the next lower choice. None where there is none, or nothing says where the key stands.
    pub fn smaller(&self) -> Option<Value> {
        let now = self.current.as_ref()?;
        match &self.domain {
            Domain::Range { .. } => self.scaled(0.5),
            Domain::Choice(choices) => {
                let below = |c: &&Value| c.as_f64().zip(now.as_f64()).is_some_and(|(c, now)| c < now);
                choices
                    .iter()
                    .filter(below)
                    .max_by(|a, b| a.as_f64().partial_cmp(&b.as_f64()).unwrap_or(Ordering::Equal))
                    .cloned()
            }
        }
    }

    /// A number of this dimension: in the range, whole where it must be, else rounded to two digits.
    fn number(&self, x: f64) -> Value {
        let Domain::Range { low, high, integer, .. } = self.domain else { return Value::Null };
        let x = if integer { x } else { two_digits(x) }.clamp(low, high);
        if integer { Value::from(x.round().clamp(low.ceil(), high.floor()) as i64) } else { Value::from(x) }
    }
}

/// Equal as values of a recipe: 1 and 1.0 are.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        _ => a == b,
    }
}

fn two_digits(x: f64) -> f64 {
    // Through decimal text, so that 3e-3 is 0.003 and not its neighbour.
    format!("{x:.1e}").parse().unwrap_or(x)
}

/// All schemas that speak about `value`: references and `allOf` followed, of `anyOf` and `oneOf` only the branches that admit it.
fn applicable<'a>(root: &'a Value, schema: &'a Value, value: Option<&Value>, into: &mut Vec<&'a Value>) {
    into.push(schema);
    let target = schema["$ref"].as_str().and_then(|name| root.pointer(name.strip_prefix('#')?));
    if let Some(target) = target {
        applicable(root, target, value, into);
    }
    for branch in schema["allOf"].as_array().into_iter().flatten() {
        applicable(root, branch, value, into);
    }
    for branch in ["anyOf", "oneOf"].iter().filter_map(|key| schema[key].as_array()).flatten() {
        let mut below = Vec::new();
        applicable(root, branch, value, &mut below);
        if below.iter().all(|schema| admits(schema, value)) {
            into.extend(below);
        }
    }
}

fn admits(schema: &Value, value: Option<&Value>) -> bool {
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let has_required = required.into_iter().all(|key| value.is_some_and(|v| v.get(key).is_some()));
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    let fits = match value {
        // Of an absent value the branch that is not null speaks.
        None => kinds != ["null"],
        Some(v) => kinds.is_empty() || kinds.contains(&kind_of(v)) || (v.is_i64() && kinds.contains(&"number")),
    };
    has_required && fits
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

struct Walk<'a> {
    space: &'a mut Space,
    root: &'a Value,
    resolved: &'a Value,
}

fn walk(on: &mut Walk, schema: &Value, value: Option<&Value>, default: Option<&Value>, key: String) {
    let Walk { root, resolved, .. } = *on;
    let value = value.filter(|v| !v.is_null());
    let mut all = Vec::new();
    applicable(root, schema, value, &mut all);
    // The default of the enclosing mapping knows better than the type's own.
    let default = default.or_else(|| all.iter().find_map(|s| s.get("default"))).filter(|v| !v.is_null());
    let effective = value.or(default).or_else(|| at(resolved, &key).filter(|v| !v.is_null()));
    if let Some(domain) = all.iter().find_map(|s| domain(s.get("x-tunable")?, &all)) {
        if let Some(value) = effective {
            on.space.known.insert(key.clone(), value.clone());
        }
        on.space.dimensions.push(Dimension { key, domain, current: effective.cloned() });
        return;
    }
    let join = |part: &str| if key.is_empty() { part.to_string() } else { format!("{key}.{part}") };
    // A model read `from` a checkpoint has that checkpoint's shape: nothing beside it can be turned.
    let fixed = value.is_some_and(|v| v.get("from").is_some_and(|from| !from.is_null()));
    let properties: Vec<_> = all.iter().filter_map(|s| s["properties"].as_object()).flatten().collect();
    if !properties.is_empty() && effective.is_none_or(Value::is_object) {
        for (name, schema) in properties.into_iter().filter(|_| !fixed) {
            let (value, default) = (value.and_then(|v| v.get(name)), default.and_then(|v| v.get(name)));
            walk(on, schema, value, default, join(name));
        }
    } else if let Some(Value::Array(list)) = value {
        // Items of a list that the recipe does not have cannot be named in an edit.
        let items: Vec<_> = all.iter().map(|s| &s["items"]).filter(|items| items.is_object()).collect();
        match items.first() {
            Some(items) => {
                list.iter().enumerate().for_each(|(i, v)| walk(on, items, Some(v), None, join(&i.to_string())))
            }
            None => drop(on.space.known.insert(key, Value::Array(list.clone()))),
        }
    } else if let Some(leaf) = effective {
        on.space.known.insert(key, leaf.clone());
    }
}

fn domain(mark: &Value, all: &[&Value]) -> Option<Domain> {
    if let Some(choices) = mark["choices"].as_array() {
        return (choices.len() > 1).then(|| Domain::Choice(choices.clone()));
    }
    let (low, high, log) = (mark["low"].as_f64()?, mark["high"].as_f64()?, mark["scale"] == "log");
    let is_integer =
        |s: &&Value| s["type"] == "integer" || s["type"].as_array().is_some_and(|k| k.contains(&"integer".into()));
    let sound = low < high && high.is_finite() && (!log || low > 0.0);
    sound.then(|| Domain::Range { low, high, log, integer: all.iter().any(is_integer) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    #[derive(Serialize, Deserialize, JsonSchema, Default)]
    #[serde(default)]
    struct Recipe {
        model: Model,
        optimizer: Optimizer,
        stages: Vec<Stage>,
    }
    #[derive(Serialize, Deserialize, JsonSchema, Default)]
    #[serde(default)]
    struct Model {
        #[serde(skip_serializing_if = "Option::is_none")]
        from: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(extend("x-tunable" = {"low": 2, "high": 12, "scale": "linear"}))]
        layers: Option<usize>,
    }
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Optimizer {
        #[schemars(extend("x-tunable" = {"low": 1e-4, "high": 1e-2, "scale": "log"}))]
        lr: f64,
        #[schemars(extend("x-tunable" = {"choices": [[0.9, 0.95], [0.9, 0.999]], "scale": "choice"}))]
        betas: [f64; 2],
        seed_free: bool,
    }
    impl Default for Optimizer {
        fn default() -> Self {
            Self { lr: 1e-3, betas: [0.9, 0.95], seed_free: true }
        }
    }
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "kebab-case")]
    enum Stage {
        Sft(Sft),
        Rl(Rl),
    }
    #[derive(Serialize, Deserialize, JsonSchema, Default)]
    #[serde(default)]
    struct Sft {
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(extend("x-tunable" = {"low": 1e-4, "high": 1e-2, "scale": "log"}))]
        lr: Option<f64>,
        task: String,
    }
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Rl {
        #[schemars(extend("x-tunable" = {"low": 4, "high": 32, "scale": "log"}))]
        group: usize,
    }
    impl Default for Rl {
        fn default() -> Self {
            Self { group: 8 }
        }
    }

    fn space(recipe: Value) -> Space {
        Space::of(&schemars::schema_for!(Recipe).to_value(), &recipe, &Value::Null)
    }

    #[test]
    fn marks_are_found_through_references_lists_and_variants() {
        let space =
            space(json!({"optimizer": {"lr": 3e-3}, "stages": [{"sft": {}}, {"rl": {"group": 16}}, {"rl": null}]}));
        let found: Vec<_> = space.dimensions.iter().map(|d| (d.key.as_str(), d.current.clone())).collect();
        let expected = [
            ("model.layers", None),
            ("optimizer.lr", Some(json!(3e-3))),
            ("optimizer.betas", Some(json!([0.9, 0.95]))),
            ("stages.0.sft.lr", Some(json!(3e-3))),
            ("stages.1.rl.group", Some(json!(16))),
            ("stages.2.rl.group", Some(json!(8))),
        ];
        assert_eq!(found, expected);
        assert!(matches!(space.dimensions[4].domain, Domain::Range { integer: true, log: true, .. }));
        assert_eq!(space.known["optimizer.seed_free"], json!(true));
    }

    #[test]
    fn a_single_stage_is_turned_where_its_values_come_from() {
        let keys = |recipe| space(recipe).dimensions.into_iter().map(|d| d.key).collect::<Vec<_>>();
        assert!(!keys(json!({"stages": [{"sft": {}}]})).contains(&"stages.0.sft.lr".to_string()));
        assert!(keys(json!({"stages": [{"sft": {"lr": 1e-3}}]})).contains(&"stages.0.sft.lr".to_string()));
    }

    #[test]
    fn smaller_sizes_are_found() {
        let layers = |recipe| space(recipe).dimension("model.layers").unwrap().smaller();
        assert_eq!((layers(json!({})), layers(json!({"model": {"layers": 8}}))), (None, Some(json!(4))));
        let widths = Domain::Choice(vec![json!(48), json!(64), json!(96)]);
        let width = |now| Dimension { key: "w".into(), domain: widths.clone(), current: Some(now) }.smaller();
        assert_eq!((width(json!(96)), width(json!(48))), (Some(json!(64)), None));
    }

    #[test]
    fn absent_keys_stand_at_their_defaults() {
        let space = space(json!({}));
        assert_eq!(space.dimension("optimizer.lr").unwrap().current, Some(json!(1e-3)));
        assert!(space.dimensions.iter().all(|d| !d.key.starts_with("stages")));
    }

    #[test]
    fn what_a_run_made_of_a_preset_is_known() {
        let schema = schemars::schema_for!(Recipe).to_value();
        let resolved = json!({"model": {"layers": 6}, "optimizer": {"lr": 0.5}});
        let space = Space::of(&schema, &json!({"optimizer": {"lr": 2e-3}}), &resolved);
        assert_eq!(space.dimension("model.layers").unwrap().current, Some(json!(6)));
        assert_eq!(
            space.dimension("optimizer.lr").unwrap().current,
            Some(json!(2e-3)),
            "the recipe itself comes first"
        );
    }

    #[test]
    fn a_model_from_a_checkpoint_keeps_its_shape() {
        assert!(space(json!({"model": {"from": "base"}})).dimension("model.layers").is_none());
    }

    #[test]
    fn values_and_positions_agree_and_read_well() {
        let space = space(json!({"stages": [{"rl": {}}]}));
        let lr = space.dimension("optimizer.lr").unwrap();
        assert_eq!((lr.value(0.5), lr.value(0.0), lr.value(1.0)), (json!(1e-3), json!(1e-4), json!(1e-2)));
        assert_eq!((lr.scaled(3.0), lr.scaled(300.0)), (Some(json!(3e-3)), Some(json!(1e-2))));
        assert!((lr.position(&json!(1e-3)).unwrap() - 0.5).abs() < 1e-12);
        let group = space.dimension("stages.0.rl.group").unwrap();
        assert_eq!((group.value(0.34), group.scaled(2.0), group.scaled(1.01)), (json!(8), Some(json!(16)), None));
        let betas = space.dimension("optimizer.betas").unwrap();
        assert_eq!(betas.value(betas.position(&json!([0.9, 0.999])).unwrap()), json!([0.9, 0.999]));
        assert_eq!(betas.position(&json!([0.5, 0.5])), None);
    }
}
