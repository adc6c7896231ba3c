//! Reading the YAML that people write into typed structs: unknown keys are refused with the file, line, column and the nearest
//! valid key. Not for files that Hone writes for itself, which are JSON.

use std::path::Path;

use schemars::JsonSchema;
use serde::de::{DeserializeOwned, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_saphyr::{Error, Location, Spanned};

use crate::failure::{Class, Failure, Result};

/// Reads the YAML file at `path`. `T` refuses unknown keys itself (`#[serde(deny_unknown_fields)]`).
///
/// # Errors
/// [`Class::Usage`], with the place and a hint, where the file cannot be read or does not fit `T`.
pub fn read<T: DeserializeOwned + JsonSchema>(path: &Path) -> Result<T> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|e| {
        Failure::new(Class::Usage, format!("Cannot read {name}: {e}."))
            .hint("check that the path names a readable UTF-8 text file")
    })?;
    parse(&text, &name)
}

/// Reads YAML from `text`; `name` is what errors call it, usually its path.
///
/// Booleans are `true` and `false` alone (YAML 1.1's `yes` and `on` are refused where a boolean is expected), a key stands
/// once, and `- rl: {}` is the variant `rl` of an externally tagged enum.
///
/// # Errors
/// [`Class::Usage`], with `name:line:column` and a hint, where the text does not fit `T`.
pub fn parse<T: DeserializeOwned + JsonSchema>(text: &str, name: &str) -> Result<T> {
    serde_saphyr::from_str_with_options(text, options()).map_err(|error| explain(&error, text, name, &schema::<T>()))
}

/// The JSON Schema (draft 2020-12) of `T`, as `hone schema` prints it.
pub fn schema<T: JsonSchema>() -> Value {
    schemars::schema_for!(T).to_value()
}

/// The nearest of `valid` to `word`, where one is near enough to be meant: a slip of few letters, or a common beginning.
pub fn nearest<'a>(word: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let score = |name: &str| {
        let name = name.to_lowercase();
        let slip = strsim::normalized_damerau_levenshtein(&word, &name);
        let beginning = strsim::jaro_winkler(&word, &name);
        if slip > 0.5 || beginning > 0.8 { slip + beginning } else { 0.0 }
    };
    let scored = valid.into_iter().map(|name| (score(name), name)).filter(|(score, _)| *score > 0.0);
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! { strict_booleans: true, with_snippet: false }
}

/// What went wrong, in our words: message and hint, with the place.
fn explain(error: &Error, text: &str, name: &str, schema: &Value) -> Failure {
    let mut error = error.without_snippet();
    while let Error::AliasError { error: inner, .. } = error {
        error = inner;
    }
    let place = |location: Option<Location>| match location {
        Some(at) if at.line() > 0 => format!("{name}:{}:{}", at.line(), at.column()),
        _ => name.to_string(),
    };
    let located = |failure: Failure| failure.at(place(error.location()));
    match error {
        Error::SerdeUnknownField { field, expected, .. } => located(unknown("key", field, expected)),
        Error::SerdeUnknownVariant { variant, expected, .. } => located(unknown("value", variant, expected)),
        Error::SerdeMissingField { field, .. } => {
            located(usage(format!("The key `{field}` is missing.")).hint(format!("add `{field}:`")))
        }
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.as_deref().unwrap_or("?");
            located(usage(format!("The key `{key}` stands twice.")).hint("keep one of the two"))
        }
        Error::InvalidBooleanStrict { .. } => located(
            usage("Expected true or false.")
                .hint("write `true` or `false`; YAML 1.1's yes, no, on and off are not taken"),
        ),
        Error::SerdeInvalidType { unexpected, expected, .. }
        | Error::SerdeInvalidValue { unexpected, expected, .. } => {
            located(usage(format!("Expected {expected}, found {unexpected}.")).hint(format!("write {expected}")))
        }
        // Where an enum is told apart by its content alone, serde reports that nothing fitted and not why: the schema knows.
        other => match stray(text, schema) {
            Some(Stray { location, what, word, valid }) => unknown(what, &word, &valid).at(place(Some(location))),
            None => {
                let (message, location) = match other {
                    Error::Message { msg, location } => (msg.clone(), Some(*location)),
                    other => (plain(&other.render()), other.location()),
                };
                usage(sentence(&message)).hint("`hone schema` prints what is accepted").at(place(location))
            }
        },
    }
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Class::Usage, message)
}

fn unknown<S: AsRef<str>>(what: &str, word: &str, valid: &[S]) -> Failure {
    let failure = usage(format!("Unknown {what} `{word}`."));
    let valid: Vec<&str> = valid.iter().map(AsRef::as_ref).collect();
    let listed = valid.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match (nearest(word, valid.iter().copied()), valid.is_empty()) {
        (Some(name), _) => failure.hint(format!("did you mean `{name}`? Valid here: {listed}")),
        (None, false) => failure.hint(format!("valid here: {listed}")),
        (None, true) => failure.hint(format!("no {what} is valid here")),
    }
}

/// The parser's own words without the place, which stands apart.
fn plain(message: &str) -> String {
    let end = message.find("line ").filter(|at| *at < 40).and_then(|_| message.find(": ")).map_or(0, |at| at + 2);
    message[end..].lines().next().unwrap_or_default().to_string()
}

fn sentence(message: &str) -> String {
    let mut chars = message.trim().trim_end_matches('.').chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", chars.as_str())
}

/// The document with the place of every key and value.
#[derive(Debug)]
enum Node {
    Map(Vec<(Spanned<String>, Spanned<Node>)>),
    List(Vec<Spanned<Node>>),
    Text(String),
    Other,
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct NodeVisitor;
        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("YAML")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Node, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Node::Map(entries))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Node, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Node::List(items))
            }
            fn visit_str<E>(self, text: &str) -> std::result::Result<Node, E> {
                Ok(Node::Text(text.to_string()))
            }
            fn visit_bool<E>(self, _: bool) -> std::result::Result<Node, E> {
                Ok(Node::Other)
            }
            fn visit_i64<E>(self, _: i64) -> std::result::Result<Node, E> {
                Ok(Node::Other)
            }
            fn visit_u64<E>(self, _: u64) -> std::result::Result<Node, E> {
                Ok(Node::Other)
            }
            fn visit_f64<E>(self, _: f64) -> std::result::Result<Node, E> {
                Ok(Node::Other)
            }
            fn visit_unit<E>(self) -> std::result::Result<Node, E> {
                Ok(Node::Other)
            }
        }
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// A key or value that no branch of the schema knows.
struct Stray {
    location: Location,
    what: &'static str,
    word: String,
    valid: Vec<String>,
}

fn stray(text: &str, schema: &Value) -> Option<Stray> {
    let document: Spanned<Node> = serde_saphyr::from_str_with_options(text, options()).ok()?;
    stray_in(schema, &[schema], &document)
}

/// All alternatives that `schema` offers, references followed. Recursive types end at the depth of the document, which drives
/// the walk; a schema that refers to itself without consuming a key does not come out of a Rust type.
fn branches<'a>(root: &'a Value, schema: &'a Value, into: &mut Vec<&'a Value>) {
    if let Some(name) = schema["$ref"].as_str() {
        if let Some(target) = name.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) {
            branches(root, target, into);
        }
    }
    let nested = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema[key].as_array()).flatten();
    for branch in nested {
        branches(root, branch, into);
    }
    into.push(schema);
}

fn stray_in(root: &Value, schemas: &[&Value], node: &Spanned<Node>) -> Option<Stray> {
    let mut all = Vec::new();
    for schema in schemas {
        branches(root, schema, &mut all);
    }
    match &node.value {
        Node::Map(entries) => {
            if all.iter().any(|schema| schema["additionalProperties"].as_bool() == Some(true)) {
                return None;
            }
            let open: Vec<&Value> =
                all.iter().map(|schema| &schema["additionalProperties"]).filter(|s| s.is_object()).collect();
            let valid: Vec<String> = all
                .iter()
                .filter_map(|schema| schema["properties"].as_object())
                .flat_map(|p| p.keys().cloned())
                .collect();
            entries.iter().find_map(|(key, value)| {
                let word = &key.value;
                let inner: Vec<&Value> = all.iter().filter_map(|schema| schema["properties"].get(word)).collect();
                match (inner.is_empty(), open.is_empty()) {
                    (false, _) => stray_in(root, &inner, value),
                    (true, false) => stray_in(root, &open, value),
                    (true, true) if valid.is_empty() => None,
                    (true, true) => {
                        Some(Stray { location: key.referenced, what: "key", word: word.clone(), valid: valid.clone() })
                    }
                }
            })
        }
        Node::List(items) => {
            let inner: Vec<&Value> =
                all.iter().map(|schema| &schema["items"]).filter(|items| items.is_object()).collect();
            if inner.is_empty() { None } else { items.iter().find_map(|item| stray_in(root, &inner, item)) }
        }
        Node::Text(word) => {
            let free = |schema: &&&Value| {
                let kind = &schema["type"];
                let text = kind == "string" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|k| k == "string"));
                text && schema.get("enum").is_none() && schema.get("const").is_none()
            };
            if all.iter().any(|schema| free(&schema)) {
                return None;
            }
            let listed = all.iter().filter_map(|schema| schema["enum"].as_array()).flatten();
            let valid: Vec<String> = listed
                .chain(all.iter().filter_map(|schema| schema.get("const")))
                .filter_map(|value| value.as_str().map(str::to_string))
                .collect();
            let known = valid.is_empty() || valid.contains(word);
            (!known).then(|| Stray { location: node.referenced, what: "value", word: word.clone(), valid })
        }
        Node::Other => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, JsonSchema, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Recipe {
        lr: f64,
        #[serde(default)]
        shuffle: bool,
        #[serde(default)]
        stages: Vec<Stage>,
        #[serde(default)]
        proposer: Option<Proposer>,
    }

    #[derive(Debug, Deserialize, JsonSchema, PartialEq)]
    #[serde(rename_all = "kebab-case")]
    enum Stage {
        Sft(Sft),
        Rl(Sft),
    }

    #[derive(Debug, Default, Deserialize, JsonSchema, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Sft {
        examples: u64,
        digits: u64,
    }

    #[derive(Debug, Deserialize, JsonSchema, PartialEq)]
    #[serde(untagged)]
    enum Proposer {
        Named(Named),
        Llm { llm: Llm },
    }

    #[derive(Debug, Deserialize, JsonSchema, PartialEq)]
    #[serde(rename_all = "kebab-case")]
    enum Named {
        Search,
        Random,
    }

    #[derive(Debug, Deserialize, JsonSchema, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Llm {
        model: String,
    }

    fn refused(text: &str) -> (String, String, String) {
        let failure = parse::<Recipe>(text, "recipe.yaml").unwrap_err();
        assert_eq!(failure.class, Class::Usage);
        (failure.at.unwrap(), failure.message, failure.hint.unwrap())
    }

    #[test]
    fn reads_externally_tagged_stages() {
        let recipe: Recipe = parse("lr: 1e-3\nstages:\n  - sft: {examples: 5}\n  - rl: {}\n", "r").unwrap();
        assert_eq!(recipe.stages, [Stage::Sft(Sft { examples: 5, digits: 0 }), Stage::Rl(Sft::default())]);
    }

    #[test]
    fn a_misspelt_key_names_its_line_and_the_nearest() {
        let (at, message, hint) = refused("lr: 1e-3\nstages:\n  - sft: {exmples: 5}\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:3:11", "Unknown key `exmples`."));
        assert!(hint.starts_with("did you mean `examples`?"), "{hint}");
        let (at, message, hint) = refused("lr: 1\nzzz: 2\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:2:1", "Unknown key `zzz`."));
        assert!(hint.starts_with("valid here: `lr`, `shuffle`"), "{hint}");
    }

    #[test]
    fn a_misspelt_stage_names_the_nearest() {
        let (at, message, hint) = refused("lr: 1e-3\nstages:\n  - stf: {}\n");
        assert!(at.starts_with("recipe.yaml:3:"), "{at}");
        assert_eq!(message, "Unknown value `stf`.");
        assert!(hint.starts_with("did you mean `sft`?"), "{hint}");
    }

    #[test]
    fn untagged_alternatives_are_explained_too() {
        let (at, message, hint) = refused("lr: 1\nproposer:\n  llm: {modle: x}\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:3:9", "Unknown key `modle`."));
        assert!(hint.starts_with("did you mean `model`?"), "{hint}");
        let (at, message, hint) = refused("lr: 1\nproposer: serch\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:2:11", "Unknown value `serch`."));
        assert!(hint.starts_with("did you mean `search`?"), "{hint}");
    }

    #[test]
    fn the_other_refusals_say_what_to_do() {
        let (at, message, hint) = refused("lr: 1\nshuffle: yes\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:2:10", "Expected true or false."));
        assert!(hint.contains("`true` or `false`"));
        let (at, message, _) = refused("lr: 1\nlr: 2\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:2:1", "The key `lr` stands twice."));
        let (at, message, _) = refused("shuffle: true\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:1:1", "The key `lr` is missing."));
        let (at, _, _) = refused("lr: [1\n");
        assert!(at.starts_with("recipe.yaml:"), "{at}");
        let (at, message, _) = refused("lr: fast\n");
        assert!(at == "recipe.yaml:1:5" && message.ends_with('.'), "{at} {message}");
    }

    #[test]
    fn a_file_that_is_not_there_is_a_usage_failure() {
        let failure = read::<Recipe>(Path::new("/no/such.yaml")).unwrap_err();
        assert_eq!(failure.class, Class::Usage);
        assert!(failure.message.contains("/no/such.yaml"));
    }
}
