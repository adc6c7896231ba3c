//! The goal: the YAML file a person writes. What is judged, what may be edited, how much may be spent, who decides. Typed, and refused
//! where it says something that Hone would not do; nothing here runs anything.

use crate::judge::{Direction, Gate, alpha_of};
use crate::scope::Scope;
use hone_evals::suite::{Subset, Suite};
use hone_runs::quantity::{Bytes, Count, Span};
use hone_runs::{Class, Failure, Result, config};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;

/// `goal.yaml`. Paths are relative to the repository's root, with `/` between their parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// One sentence, shown everywhere.
    pub goal: String,
    /// What is judged.
    pub metric: Metric,
    /// What else may not get worse.
    #[serde(default)]
    pub floors: Vec<Floor>,
    /// What a candidate may touch, in patterns as of a .gitignore. All else is protected; the goal, the suites, their data and `prompts/` always are.
    pub edit: Vec<String>,
    /// What a run executes.
    #[serde(default)]
    pub run: Run,
    /// Replicates and their limits.
    #[serde(default)]
    pub runs: Runs,
    /// What the campaign may spend. What is not named is not limited, rounds aside.
    #[serde(default)]
    pub budget: Budget,
    /// Who proposes.
    #[serde(default)]
    pub proposer: Proposers,
    /// The error that is held over the campaign.
    #[serde(default)]
    pub gate: Gate,
    /// Who decides.
    #[serde(default)]
    pub review: Review,
}

/// The score that decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// The suite that yields it.
    pub suite: String,
    /// `task/score`, e.g. `add/pass@1`.
    pub name: String,
    /// Which way is better.
    #[serde(default)]
    pub direction: Direction,
    /// Smaller improvements are not worth keeping; above zero, in the metric's unit.
    pub min_effect: f64,
    /// Held-out items are dealt into so many parts: one for each confirmation in turn, and the last for the closing alone.
    #[serde(default = "parts")]
    #[schemars(range(min = 2, max = 100))]
    pub folds: usize,
}

/// Another score that may not get worse by more than `max_drop`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// The suite that yields it.
    pub suite: String,
    /// `task/score`.
    pub name: String,
    /// Which way is better.
    #[serde(default)]
    pub direction: Direction,
    /// What it may get worse by; zero or more, in its own unit.
    pub max_drop: f64,
}

/// What a run executes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Run {
    /// The recipe that Hone's trainer is given.
    pub recipe: String,
}

impl Default for Run {
    fn default() -> Self {
        Self { recipe: "recipe/recipe.yaml".into() }
    }
}

/// Replicates and their limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Runs {
    /// Seeds a comparison takes at least and at most: `3..12`, or one number.
    pub replicates: Replicates,
    /// Runs at a time. The verdicts do not depend on it.
    pub parallel: Parallel,
    /// A run, evaluation apart, is ended after this time; it is then incomplete, never worse.
    pub timeout: Span,
}

impl Default for Runs {
    fn default() -> Self {
        Self { replicates: Replicates { fewest: 3, most: 12 }, parallel: Parallel::Auto, timeout: Span::seconds(600) }
    }
}

/// The fewest and the most seeds of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicates {
    /// At least 2.
    pub fewest: usize,
    /// At most 50.
    pub most: usize,
}

/// How many runs go on side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parallel {
    /// As many as the machine has room for.
    Auto,
    /// At most this many.
    At(usize),
}

/// What the campaign may spend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Budget {
    /// Rounds, exactly.
    #[schemars(range(min = 1, max = 9999))]
    pub rounds: u32,
    /// Time at work, pauses apart.
    pub wall: Option<Span>,
    /// Hours of one device, summed over runs.
    pub device_hours: Option<f64>,
    /// US dollars for models' replies.
    pub usd: Option<f64>,
    /// Tokens of models' prompts and replies.
    pub tokens: Option<Count>,
    /// What the run folders may hold.
    pub disk: Option<Bytes>,
}

impl Default for Budget {
    fn default() -> Self {
        Self { rounds: 100, wall: None, device_hours: None, usd: None, tokens: None, disk: None }
    }
}

/// Who proposes: one, or several that take turns round by round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Proposers {
    /// A single proposer.
    One(Proposer),
    /// The n-th of them proposes in rounds n, n + their number, and so on.
    Turns(Vec<Proposer>),
}

impl Default for Proposers {
    fn default() -> Self {
        Self::One(Proposer::Search)
    }
}

impl Proposers {
    /// All of them, in turn.
    pub fn all(&self) -> &[Proposer] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Turns(turns) => turns,
        }
    }
}

/// A proposer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Proposer {
    /// The built-in search: no network, no key.
    Search,
    /// A language model.
    Llm(Llm),
}

/// A language model behind an OpenAI-compatible endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Llm {
    /// The model's name at the endpoint.
    pub model: String,
    /// The endpoint.
    #[serde(default = "openai")]
    pub base_url: String,
    /// The environment variable that holds the key; the key itself never stands in a goal. Absent: no key is sent.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// Absent: the endpoint's own default.
    #[serde(default)]
    pub temperature: Option<f32>,
    /// Tokens of one reply at most.
    #[serde(default = "reply_tokens")]
    pub max_tokens: u32,
    /// A reply that takes longer is given up.
    #[serde(default = "reply_time")]
    pub timeout: Span,
    /// Absent: the spend is counted in tokens alone, and a budget in dollars is refused.
    #[serde(default)]
    pub price: Option<Price>,
}

/// What a model's tokens cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// US dollars for a million tokens of prompt.
    pub input: f64,
    /// US dollars for a million tokens of reply.
    pub output: f64,
}

fn parts() -> usize {
    5
}

fn openai() -> String {
    "https://api.openai.com/v1".into()
}

fn reply_tokens() -> u32 {
    4096
}

fn reply_time() -> Span {
    Span::seconds(120)
}

/// Who decides, and on what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Review {
    /// Who keeps.
    pub keep: Keeper,
    /// With `keep: policy`: what is kept provisionally.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<When>,
    /// With `keep: policy`: what is left to a person all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unless: Option<Unless>,
}

/// Who keeps a candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Keeper {
    /// A person, in the review queue; until then the incumbent stays.
    #[default]
    Person,
    /// The campaign, provisionally: the item stays in the queue until a person confirms it or rolls it back.
    Policy,
}

/// What the policy keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// A confirmed improvement.
    Better,
}

/// What the policy leaves to a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Unless {
    /// An item that carries a flag.
    Flagged,
}

/// Keys that a goal may hold one day. Refused by name, since ignoring one would be a lie.
const NOT_SERVED: [(&str, &str); 4] = [
    ("github", "Nothing leaves this machine; push a kept branch with `git push`."),
    ("notify", "Read `hone campaign status`, or wait for `hone campaign run` to end."),
    ("schedule", "Start the campaign from cron."),
    ("escalate", "Limit the campaign with `budget:`."),
];

impl Goal {
    /// Reads a goal; `name` is what errors call the text.
    ///
    /// # Errors
    /// `Usage`, with file, line and column, where it is not a goal that can be pursued.
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        for (key, instead) in NOT_SERVED {
            if let Some(line) =
                text.lines().position(|l| l.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(':')))
            {
                return Err(Failure::new(Class::Usage, format!("`{key}` is not served by this version of Hone."))
                    .hint(format!("Remove it. {instead}"))
                    .at(format!("{name}:{}:1", line + 1)));
            }
        }
        let goal: Self = config::parse(text, name)?;
        goal.check().map_err(|(key, failure)| {
            let line = text.lines().position(|l| l.contains(&format!("{key}:")));
            failure.at(line.map_or(name.to_string(), |n| format!("{name}:{}", n + 1)))
        })?;
        Ok(goal)
    }

    /// The JSON Schema of a goal.
    pub fn schema() -> serde_json::Value {
        config::schema::<Self>()
    }

    /// The suites that judge, each once, the metric's first.
    pub fn suites(&self) -> Vec<String> {
        let mut suites = vec![self.metric.suite.clone()];
        for floor in &self.floors {
            if !suites.contains(&floor.suite) {
                suites.push(floor.suite.clone());
            }
        }
        suites
    }

    /// What a candidate may touch, the goal at `path`, the suites and the suites' `data` excepted.
    ///
    /// # Errors
    /// `Usage` when a pattern cannot be read.
    pub fn scope(&self, path: &str, data: &[String]) -> Result<Scope> {
        let closed: Vec<String> =
            [path.to_string()].into_iter().chain(self.suites()).chain(data.iter().cloned()).collect();
        Scope::new(&self.edit, &closed)
    }

    /// The smallest gain that a first confirmation can show with probability 0.8, as far as the number of its items goes: with the most
    /// replicates, at the worst rate of one half, and however alike the seeds are. None for losses, whose spread no rule bounds. `suite` is
    /// the metric's.
    ///
    /// # Errors
    /// `Usage` when the suite lacks the metric, or a part of its held-out items has fewer than two.
    pub fn detectable(&self, suite: &Suite) -> Result<Option<f64>> {
        let part = Subset::held_out_fold(0, self.metric.folds);
        // The confirmation's test is one-sided.
        let level = (2.0 * alpha_of(&self.gate, 1, 0)).min(0.5);
        suite.detectable(&self.metric.name, &part, self.runs.replicates.most, level, 0.8)
    }

    /// What the types alone do not say. The key names the line.
    fn check(&self) -> std::result::Result<(), (&'static str, Failure)> {
        let wrong = |key, message: &str, hint: &str| Err((key, Failure::new(Class::Usage, message).hint(hint)));
        if self.goal.trim().is_empty() {
            return wrong("goal", "`goal` is empty.", "Say in one sentence what should become better.");
        }
        if !(self.metric.min_effect.is_finite() && self.metric.min_effect > 0.0) {
            return wrong(
                "min_effect",
                "`min_effect` must be above zero.",
                "Name the smallest improvement that is worth keeping.",
            );
        }
        if !(2..=100).contains(&self.metric.folds) {
            return wrong("folds", "`folds` must be from 2 to 100.", "Leave it out for 5.");
        }
        if self.metric.name.split('/').filter(|part| !part.is_empty()).count() != 2 {
            return wrong("name", "`metric.name` must be `task/score`.", "For example `add/pass@1`.");
        }
        for floor in &self.floors {
            if !(floor.max_drop.is_finite() && floor.max_drop >= 0.0) {
                return wrong("floors", "`max_drop` must be zero or more.", "Name what the score may get worse by.");
            }
        }
        if self.edit.is_empty() {
            return wrong(
                "edit",
                "`edit` opens nothing, so nothing can be proposed.",
                "For example `edit: [recipe/**]`.",
            );
        }
        let scope = Scope::new(&self.edit, &[]).map_err(|f| ("edit", f))?;
        if let Some(suite) = self.suites().iter().find(|s| scope.matches(s)) {
            let message = format!("`edit` opens {suite}, which judges.");
            return wrong(
                "edit",
                &message,
                "Leave the suites out of `edit`: a candidate may not touch what measures it.",
            );
        }
        for path in self.suites().iter().chain([&self.run.recipe]) {
            if !crate::scope::is_plain(path) {
                let message = format!("`{path}` is not a path inside the workspace.");
                return wrong(
                    "suite",
                    &message,
                    "Write it relative to the repository's root, with `/`, without `.` and `..`.",
                );
            }
        }
        if self.budget.rounds == 0 || self.budget.rounds > 9999 {
            return wrong("rounds", "`budget.rounds` must be from 1 to 9999.", "Start another campaign for more.");
        }
        for (key, amount) in [("device_hours", self.budget.device_hours), ("usd", self.budget.usd)] {
            if amount.is_some_and(|a| !(a.is_finite() && a > 0.0)) {
                return wrong(key, &format!("`budget.{key}` must be above zero."), "Leave it out for no limit.");
            }
        }
        if !(self.gate.alpha > 0.0 && self.gate.alpha < 1.0) {
            return wrong("gate", "`gate.alpha` must lie between 0 and 1.", "0.05 is usual.");
        }
        if self.proposer.all().is_empty() {
            return wrong("proposer", "`proposer` is an empty list.", "Write `proposer: search`.");
        }
        let unpriced = |p: &Proposer| matches!(p, Proposer::Llm(llm) if llm.price.is_none());
        if self.budget.usd.is_some() && self.proposer.all().iter().any(unpriced) {
            return wrong(
                "usd",
                "`budget.usd` cannot be held: the model has no price.",
                "Add `price: {input: …, output: …}` (dollars for a million tokens) to the model, or limit `tokens`.",
            );
        }
        let policy = self.review.keep == Keeper::Policy;
        if policy != self.review.when.is_some() || (!policy && self.review.unless.is_some()) {
            return wrong(
                "review",
                "`review` must be `{keep: person}`, or `{keep: policy, when: better}` with or without `unless: flagged`.",
                "`when` says what the policy keeps; a person needs no rule.",
            );
        }
        Ok(())
    }
}

impl fmt::Display for Replicates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.fewest, self.most)
    }
}

impl std::str::FromStr for Replicates {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |t: &str| t.trim().parse::<usize>().ok();
        let range = match text.split_once("..") {
            Some((a, b)) => number(a).zip(number(b.trim_start_matches('='))),
            None => number(text).map(|n| (n, n)),
        };
        match range {
            Some((fewest, most)) if 2 <= fewest && fewest <= most && most <= 50 => Ok(Self { fewest, most }),
            Some((fewest, _)) if fewest < 2 => {
                Err(format!("`{text}` is too few: with one seed the noise is unknown; take 2 or more"))
            }
            Some(_) => Err(format!("`{text}` must go from fewer to more, and to 50 at most")),
            None => Err(format!("`{text}` is not a range like 3..12")),
        }
    }
}

impl std::str::FromStr for Parallel {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(n)) if n > 0 => Ok(Self::At(n)),
            _ => Err(format!("`{text}` is neither `auto` nor a number of runs")),
        }
    }
}

/// Reads a number or a string through `FromStr`.
fn read<'de, D: Deserializer<'de>, T: std::str::FromStr<Err = String>>(
    deserializer: D,
    expected: &'static str,
) -> std::result::Result<T, D::Error> {
    struct Word<T>(&'static str, std::marker::PhantomData<T>);
    impl<T: std::str::FromStr<Err = String>> de::Visitor<'_> for Word<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
        fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<T, E> {
            text.trim().parse().map_err(E::custom)
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> std::result::Result<T, E> {
            number.to_string().parse().map_err(E::custom)
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> std::result::Result<T, E> {
            number.to_string().parse().map_err(E::custom)
        }
    }
    deserializer.deserialize_any(Word(expected, std::marker::PhantomData))
}

impl<'de> Deserialize<'de> for Replicates {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        read(deserializer, "a range of seeds like 3..12")
    }
}

impl Serialize for Replicates {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Parallel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        read(deserializer, "`auto` or a number of runs")
    }
}

impl Serialize for Parallel {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::At(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl JsonSchema for Replicates {
    fn schema_name() -> Cow<'static, str> {
        "Replicates".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "The fewest and the most seeds of a comparison, from 2 to 50: `3..12`, or one number for both.",
            "type": ["string", "integer"],
            "examples": ["3..12", 5],
        })
    }
}

impl JsonSchema for Parallel {
    fn schema_name() -> Cow<'static, str> {
        "Parallel".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Runs at a time: a number, or `auto` for as many as the machine has room for.",
            "type": ["string", "integer"],
            "examples": ["auto", 2],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "goal: raise pass@1 on two-digit addition\nmetric: {suite: evals/add.yaml, name: add/pass@1, min_effect: 0.03}\nedit: [recipe/**]\n";

    fn refused(text: &str) -> Failure {
        let failure = Goal::parse(text, "goal.yaml").unwrap_err();
        assert_eq!(failure.class, Class::Usage);
        failure
    }

    #[test]
    fn the_smallest_goal_has_every_default() {
        let goal = Goal::parse(SMALL, "goal.yaml").unwrap();
        assert_eq!(goal.metric.direction, Direction::Maximize);
        assert_eq!(goal.run.recipe, "recipe/recipe.yaml");
        assert_eq!(goal.runs, Runs::default());
        assert_eq!((goal.budget.rounds, goal.budget.wall), (100, None));
        assert_eq!(goal.proposer.all(), [Proposer::Search]);
        assert_eq!(goal.review.keep, Keeper::Person);
    }

    #[test]
    fn reads_a_full_goal_and_gives_it_back() {
        let text = "goal: g\nmetric: {suite: evals/add.yaml, name: add/pass@1, direction: minimize, min_effect: 1e-2}\n\
            floors: [{suite: evals/general.yaml, name: recall/accuracy, max_drop: 0.01}]\nedit: [recipe/**, scaffold/**]\n\
            run: {recipe: recipe/a.yaml}\nruns: {replicates: 3..12, parallel: 2, timeout: 10m}\n\
            budget: {rounds: 8, wall: 8h, device_hours: 6, usd: 20, tokens: 5M, disk: 50GB}\n\
            proposer: [search, {llm: {model: m, base_url: 'http://localhost:1/v1', price: {input: 1, output: 2}}}]\n\
            gate: {alpha: 0.1, error: fdr}\nreview: {keep: policy, when: better, unless: flagged}\n";
        let goal = Goal::parse(text, "goal.yaml").unwrap();
        assert_eq!(goal.suites(), ["evals/add.yaml", "evals/general.yaml"]);
        assert_eq!(goal.runs.replicates, Replicates { fewest: 3, most: 12 });
        assert_eq!(goal.runs.parallel, Parallel::At(2));
        assert_eq!(goal.budget.tokens, Some(Count(5_000_000)));
        assert!(matches!(goal.proposer.all(), [Proposer::Search, Proposer::Llm(llm)] if llm.model == "m"));
        let again: Goal = serde_json::from_value(serde_json::to_value(&goal).unwrap()).unwrap();
        assert_eq!(again, goal);
    }

    #[test]
    fn a_misspelt_key_names_its_line_and_the_nearest() {
        let failure = refused(&format!("{SMALL}runs: {{replicats: 3}}\n"));
        assert_eq!(failure.at.as_deref(), Some("goal.yaml:4:8"));
        assert!(failure.hint.unwrap().contains("`replicates`"));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        for key in ["github", "notify", "schedule", "escalate"] {
            let failure = refused(&format!("{SMALL}{key}: x\n"));
            assert_eq!(failure.at.as_deref(), Some("goal.yaml:4:1"));
            assert!(failure.message.contains(key), "{failure}");
        }
        assert!(refused(&format!("{SMALL}proposer: {{command: [a]}}\n")).to_string().contains("command"));
        assert!(refused(&format!("{SMALL}run: {{command: [a]}}\n")).to_string().contains("command"));
    }

    #[test]
    fn goals_that_cannot_be_pursued_say_why() {
        let with = |line: &str| refused(&format!("{SMALL}{line}\n")).to_string();
        assert!(with("runs: {replicates: 1}").contains("too few"));
        assert!(with("runs: {replicates: 9..3}").contains("fewer to more"));
        assert!(with("runs: {parallel: 0}").contains("neither"));
        assert!(with("budget: {rounds: 0}").contains("goal.yaml:4"));
        assert!(with("gate: {alpha: 1.5}").contains("between 0 and 1"));
        assert!(with("review: {keep: policy}").contains("when: better"));
        assert!(with("review: {keep: person, unless: flagged}").contains("keep: person"));
        assert!(with("budget: {usd: 5}\nproposer: {llm: {model: m}}").contains("no price"));
        assert!(refused(&SMALL.replace("recipe/**", "'**'")).to_string().contains("which judges"));
        assert!(refused(&SMALL.replace("0.03", "0")).to_string().contains("above zero"));
        assert!(refused(&SMALL.replace("add/pass@1", "pass@1")).to_string().contains("task/score"));
        assert!(refused(&SMALL.replace("evals/add.yaml", "../add.yaml")).to_string().contains("inside the workspace"));
    }
}
