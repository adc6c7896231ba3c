//! Reading the YAML that people write into typed structs: unknown keys are refused with the file, line, column and the nearest
//! valid key. Not for files that Hone writes for itself, which are JSON.

use std::path::Path;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::{Error, Location, Spanned};

use crate::failure::{Class, Failure, Result};
use crate::misfit::{self, Kind, Misfit, Node};

/// Reads the YAML file at `path`; see [`parse`].
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
/// once, and `- rl: {}` is the variant `rl` of an externally tagged enum. Keys that the schema of `T` does not name are refused
/// whether or not `T` refuses them itself: flattened structs cannot. So the schema must tell the whole of what `T` takes: serde's
/// `alias` is not in it, and a hand-written `Deserialize` needs a `JsonSchema` by hand.
///
/// # Errors
/// [`Class::Usage`], with `name:line:column` and a hint, where the text does not fit `T`.
pub fn parse<T: DeserializeOwned + JsonSchema>(text: &str, name: &str) -> Result<T> {
    let schema = schema::<T>();
    let value =
        serde_saphyr::from_str_with_options(text, options()).map_err(|error| explain(&error, text, name, &schema))?;
    match departure(text, &schema) {
        Some(misfit) if matches!(misfit.kind, Kind::Key { .. } | Kind::NotAMapping { .. }) => {
            Err(refusal(misfit, name))
        }
        _ => Ok(value),
    }
}

/// The JSON Schema (draft 2020-12) of `T`, as `hone schema` prints it.
pub fn schema<T: JsonSchema>() -> Value {
    schemars::schema_for!(T).to_value()
}

/// Gives a refusal without a line the place of the key that its message names first, in backticks: `lr`, `optimizer.lr`, or `lr` after
/// `stages.1.sft: `. Where the text has no such key (it is a default, or the message names none) the place is the file.
pub fn locate(failure: Failure, text: &str, name: &str) -> Failure {
    if failure.class != Class::Usage || failure.at.as_deref().is_some_and(|at| at != name) {
        return failure;
    }
    let before = failure.message.split_once(": ").map(|(path, _)| path).filter(|path| !path.contains([' ', '`']));
    let key = failure.message.split('`').nth(1).unwrap_or_default();
    let path: Vec<&str> = before.into_iter().chain([key]).flat_map(|part| part.split('.')).collect();
    let place = find(text, &path).map(|(line, column)| format!("{name}:{line}:{column}"));
    failure.at(place.unwrap_or_else(|| name.to_string()))
}

/// Line and column, from 1, of the key that a path leads to; a number in it counts the items of the list that stands there.
fn find(text: &str, path: &[&str]) -> Option<(usize, usize)> {
    let mut from = 0;
    for part in path {
        let rest = &text[from..];
        from += match part.parse::<usize>() {
            Ok(index) => item(rest, index)?,
            Err(_) => key(rest, part)?,
        };
    }
    let line = text[..from].matches('\n').count() + 1;
    Some((line, from - text[..from].rfind('\n').map_or(0, |end| end + 1) + 1))
}

/// Where `key:` begins; what stands behind a `#` is no key.
fn key(text: &str, key: &str) -> Option<usize> {
    let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    text.match_indices(key).map(|(at, _)| at).find(|&at| {
        let line = &text[text[..at].rfind('\n').map_or(0, |end| end + 1)..at];
        !key.is_empty() && text[at + key.len()..].starts_with(':') && !line.ends_with(word) && !line.contains('#')
    })
}

/// Where the item of a list begins, its dashes standing in one column.
fn item(text: &str, index: usize) -> Option<usize> {
    let mut column = None;
    let mut at = 0;
    let mut dashes = Vec::new();
    for line in text.split_inclusive('\n') {
        let indent = line.len() - line.trim_start().len();
        if line.trim_start().starts_with("- ") && *column.get_or_insert(indent) == indent {
            dashes.push(at + indent);
        }
        at += line.len();
    }
    dashes.get(index).copied()
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
    let located = |failure: Failure| failure.at(place(name, error.location()));
    match error {
        Error::SerdeUnknownField { field, expected, .. } => located(unknown("key", field, expected)),
        Error::SerdeUnknownVariant { variant, expected, .. } => located(unknown("value", variant, expected)),
        Error::SerdeMissingField { field, .. } => located(missing(field)),
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
            let expected = in_words(expected);
            located(usage(format!("Expected {expected}, found {unexpected}.")).hint(format!("write {expected}")))
        }
        Error::InvalidScalar { ty, .. } | Error::Unexpected { expected: ty, .. } => {
            let expected = in_words(ty);
            located(usage(format!("Expected {expected}.")).hint(format!("write {expected}")))
        }
        Error::MultipleDocuments { .. } => {
            located(usage("There is more than one YAML document.").hint("keep one, without a line of `---` after it"))
        }
        Error::Eof { .. } => {
            located(usage("The text ends too early.").hint("`hone init` shows what a whole file looks like"))
        }
        // Where an enum is told apart by its content alone, serde reports that nothing fitted and not why: the schema knows.
        other => match departure(text, schema) {
            Some(misfit) => refusal(misfit, name),
            None => {
                let message = match other {
                    Error::Message { msg, .. } if msg.starts_with("data did not match any variant") => {
                        "This fits none of the forms that are accepted here".into()
                    }
                    Error::Message { msg, .. } => msg.clone(),
                    other => other.render(),
                };
                located(usage(sentence(&message)).hint("`hone schema` prints what is accepted"))
            }
        },
    }
}

fn departure(text: &str, schema: &Value) -> Option<Misfit> {
    let document: Spanned<Node> = serde_saphyr::from_str_with_options(text, options()).ok()?;
    misfit::first(&document, schema)
}

fn refusal(misfit: Misfit, name: &str) -> Failure {
    let failure = match &misfit.kind {
        Kind::Key { word, valid } => unknown("key", word, valid),
        Kind::Value { word, valid } => unknown("value", word, valid),
        Kind::NotAMapping { word, keys } => {
            usage(format!("Expected a mapping, found `{word}`.")).hint(match &keys[..] {
                [] => "write keys and values".to_string(),
                keys if keys.iter().any(|key| key == word) => format!("write `{word}: {{}}`"),
                keys => format!("write keys and values; valid here: {}", listed(keys)),
            })
        }
        Kind::Missing { key } => missing(key),
    };
    failure.at(place(name, Some(misfit.location)))
}

fn missing(key: &str) -> Failure {
    usage(format!("The key `{key}` is missing.")).hint(format!("add `{key}:`"))
}

/// A type's name as a person would say it.
fn in_words(kind: &str) -> &str {
    match kind {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0",
        "i8" | "i16" | "i32" | "i64" | "isize" | "integer" => "a whole number",
        "f32" | "f64" | "floating point" => "a number",
        "bool" | "a boolean" => "true or false",
        "string scalar" | "a string" => "text",
        "sequence start" | "a sequence" => "a list",
        "mapping start" | "a map" => "a mapping",
        other => other,
    }
}

fn place(name: &str, location: Option<Location>) -> String {
    match location {
        Some(at) if at.line() > 0 => format!("{name}:{}:{}", at.line(), at.column()),
        _ => name.to_string(),
    }
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Class::Usage, message)
}

fn unknown<S: AsRef<str>>(what: &str, word: &str, valid: &[S]) -> Failure {
    let failure = usage(format!("Unknown {what} `{word}`."));
    match (nearest(word, valid.iter().map(AsRef::as_ref)), valid.is_empty()) {
        (Some(name), _) => failure.hint(format!("did you mean `{name}`? Valid here: {}", listed(valid))),
        (None, false) => failure.hint(format!("valid here: {}", listed(valid))),
        (None, true) => failure.hint(format!("no {what} is valid here")),
    }
}

fn listed<S: AsRef<str>>(names: &[S]) -> String {
    names.iter().map(|name| format!("`{}`", name.as_ref())).collect::<Vec<_>>().join(", ")
}

/// The parser's own words as a sentence, without the place, which stands apart.
fn sentence(message: &str) -> String {
    let message = message.split(" at line ").next().unwrap_or_default().lines().next().unwrap_or_default();
    let mut chars = message.trim().trim_end_matches('.').chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", chars.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize, JsonSchema, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Recipe {
        lr: f64,
        #[serde(default)]
        more: std::collections::BTreeMap<String, serde_json::Value>,
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
    #[serde(default)]
    struct Sft {
        examples: u64,
        #[serde(flatten)]
        task: Task,
    }

    #[derive(Debug, Default, Deserialize, JsonSchema, PartialEq)]
    #[serde(default)]
    struct Task {
        digits: u64,
        kind: Option<Named>,
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
    fn refusals_are_placed_at_the_key_that_they_name() {
        let text = "model: {preset: small}\noptimizer: {lr: 1e-3} # eps: 3\nstages:\n  - sft: {lr: 2}\n  - sft:\n      batch: 4\n      lr: -1\n";
        let at = |message: &str| locate(Failure::new(Class::Usage, message), text, "r.yaml").at.unwrap();
        assert_eq!(at("`optimizer.lr` is 7."), "r.yaml:2:13");
        assert_eq!(at("stages.1.sft: `lr` is -1, not positive."), "r.yaml:7:7");
        assert_eq!(at("stages.0.sft: `lr` is 2."), "r.yaml:4:11");
        assert_eq!(at("`preset` is no preset: try another."), "r.yaml:1:9");
        for nowhere in ["`optimizer.eps` is 3.", "No key at all.", "stages.4.sft: `lr` is 2.", "`é` is odd."] {
            assert_eq!(at(nowhere), "r.yaml");
        }
        let placed = Failure::new(Class::Usage, "`lr` is odd.").at("r.yaml:9:9");
        assert_eq!(locate(placed.clone(), text, "r.yaml"), placed);
    }

    #[test]
    fn reads_externally_tagged_stages() {
        let text = "lr: 1e-3\nmore: {any: {thing: [1, {goes: here}]}}\nstages:\n  - sft: {examples: 5, digits: 2, kind: random}\n  - rl: {}\n";
        let recipe: Recipe = parse(text, "r").unwrap();
        let task = Task { digits: 2, kind: Some(Named::Random) };
        assert_eq!(recipe.stages, [Stage::Sft(Sft { examples: 5, task }), Stage::Rl(Sft::default())]);
    }

    #[test]
    fn a_misspelt_key_names_its_line_and_the_nearest() {
        let (at, message, hint) = refused("lr: 1e-3\nstages:\n  - sft: {exmples: 5}\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:3:11", "Unknown key `exmples`."));
        assert!(hint.starts_with("did you mean `examples`?"), "{hint}");
        let (at, message, hint) = refused("lr: 1\nzzz: 2\n");
        assert_eq!((at.as_str(), message.as_str()), ("recipe.yaml:2:1", "Unknown key `zzz`."));
        assert!(hint.starts_with("valid here: `lr`, `more`, `shuffle`"), "{hint}");
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
    fn refusals_say_where_what_and_what_to_do() {
        for (text, at, message, hint) in [
            ("lr: 1\nshuffle: yes\n", "2:10", "Expected true or false.", "write `true` or `false`"),
            ("lr: 1\nlr: 2\n", "2:1", "The key `lr` stands twice.", "keep one"),
            ("shuffle: true\n", "1:1", "The key `lr` is missing.", "add `lr:`"),
            ("lr: fast\n", "1:5", "Expected a number.", "write a number"),
            ("lr: 1\nstages: 3\n", "2:9", "Expected a list.", "write a list"),
            ("[1]", "1:1", "Expected a mapping.", "write a mapping"),
            (
                "lr: 1\nstages:\n  - sft: {digits: -1}\n",
                "3:11",
                "Expected a whole number from 0, found integer `-1`.",
                "write",
            ),
            ("lr: 1\nproposer: {llm: {}}\n", "2:17", "The key `model` is missing.", "add `model:`"),
            ("lr: 1\nproposer: 3\n", "2:11", "This fits none of the forms that are accepted here.", "`hone schema`"),
            ("lr: 1\nstages:\n  - sft\n  - sft: {}\n", "3:5", "Expected a mapping, found `sft`.", "write `sft: {}`"),
            ("lr: 1\nstages:\n  - sft: {}\n    rl: {}\n", "4:5", "", "`hone schema`"),
            ("lr: 1\n---\nlr: 2\n", "3:1", "There is more than one YAML document.", "keep one"),
            ("", "1:1", "The text ends too early.", "`hone init`"),
            ("lr: \"x\n", "1:5", "Unclosed quote.", "`hone schema`"),
            ("lr: *x\n", "1:5", "Alias references unknown anchor.", "`hone schema`"),
        ] {
            let refusal = refused(text);
            assert_eq!(refusal.0, format!("recipe.yaml:{at}"), "{text:?} {refusal:?}");
            assert!(message.is_empty() || refusal.1 == message, "{text:?} {refusal:?}");
            assert!(refusal.1.ends_with('.') && refusal.2.starts_with(hint), "{text:?} {refusal:?}");
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_a_usage_failure() {
        let failure = read::<Recipe>(Path::new("/no/such.yaml")).unwrap_err();
        assert_eq!(failure.class, Class::Usage);
        assert!(failure.message.contains("/no/such.yaml"));
    }
}
