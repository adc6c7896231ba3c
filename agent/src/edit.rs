//! Edits of text files, and the difference they make. A `set` changes one value of a YAML or JSON file and leaves every
//! other byte as it was, comments included. Which files may be edited is not decided here.
//!
//! yamlpath finds the place, the splice is ours: its sister yamlpatch writes flow collections anew and lists in block style
//! inside flow mappings. Every `set` is checked afterwards: the file, parsed, must equal the old one with that one value changed.

use std::collections::BTreeMap;

use hone_runs::{Class, Failure, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use yamlpath::{Component, Document, Route};

/// One edit of one file. Paths are relative to the workspace, with `/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Edit {
    /// Sets one value of a YAML or JSON file; comments and formatting stay. Mappings that lack on the way are made.
    Set {
        /// The file.
        file: String,
        /// Dotted path; list indices are numbers from 0: `stages.0.sft.lr`.
        key: String,
        /// The new value.
        value: Value,
    },
    /// Replaces a passage that occurs exactly once.
    Replace {
        /// The file.
        file: String,
        /// The passage, verbatim.
        old: String,
        /// What stands there afterwards.
        new: String,
    },
    /// Writes a whole file, new or not.
    Write {
        /// The file.
        file: String,
        /// Its whole content.
        content: String,
    },
    /// Deletes a file.
    Delete {
        /// The file.
        file: String,
    },
}

impl Edit {
    /// The file it edits.
    pub fn file(&self) -> &str {
        match self {
            Edit::Set { file, .. } | Edit::Replace { file, .. } | Edit::Write { file, .. } | Edit::Delete { file } => {
                file
            }
        }
    }
}

/// A difference between two trees: one leaf of a YAML or JSON file, or a whole file of another kind (`key` is None, the values are hashes).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The file.
    pub file: String,
    /// Dotted path of the leaf.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// None where it did not exist.
    pub from: Option<Value>,
    /// None where it does not exist any more.
    pub to: Option<Value>,
}

fn refuse(message: impl Into<String>) -> Failure {
    Failure::new(Class::Agent, message)
}

/// Applies edits in order. Returns the files that differ afterwards: path to new content, None for a deleted one.
///
/// # Errors
/// [`Class::Agent`], naming the edit and what is wrong with it: an unsafe path, a passage that does not occur exactly once, a key that
/// leads nowhere, a result that is no YAML or JSON, or edits that change nothing.
pub fn apply_edits(files: &BTreeMap<String, String>, edits: &[Edit]) -> Result<BTreeMap<String, Option<String>>> {
    let mut now: BTreeMap<String, Option<String>> = BTreeMap::new();
    for (i, edit) in edits.iter().enumerate() {
        let file = edit.file();
        let place = |f: Failure| Failure { message: format!("Edit {} of {file}: {}", i + 1, f.message), ..f };
        check_path(file).map_err(place)?;
        let text = match now.get(file) {
            Some(changed) => changed.as_deref(),
            None => files.get(file).map(String::as_str),
        };
        let existing = || {
            text.ok_or_else(|| {
                let near = nearest(file, files.keys().map(String::as_str));
                place(refuse("there is no such file.").hint(match near {
                    Some(near) => format!("Did you mean {near}? A new file is made with `write`."),
                    None => "A new file is made with `write`.".into(),
                }))
            })
        };
        let new = match edit {
            Edit::Set { key, value, .. } => Some(set(file, existing()?, key, value).map_err(place)?),
            Edit::Replace { old, new, .. } => Some(replace(existing()?, old, new).map_err(place)?),
            Edit::Write { content, .. } => Some(content.clone()),
            Edit::Delete { .. } => {
                existing()?;
                None
            }
        };
        now.insert(file.into(), new);
    }
    now.retain(|file, new| new.as_ref() != files.get(file));
    if now.is_empty() {
        return Err(refuse("The edits change nothing.").hint("Set a value that differs from the present one."));
    }
    for (file, new) in &now {
        if let (Some(text), true) = (new, is_data(file)) {
            parse(file, text).map_err(|f| refuse(format!("{file} cannot be parsed after the edits: {}", f.message)))?;
        }
    }
    Ok(now)
}

/// What really differs between two trees, leaf by leaf, sorted. Comments and formatting of YAML and JSON do not count.
pub fn changes(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<Change> {
    let mut all = Vec::new();
    let files: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    for file in files {
        let (old, new) = (before.get(file), after.get(file));
        if old == new {
            continue;
        }
        let parsed = |text: Option<&String>| match text {
            Some(text) if is_data(file) => parse(file, text).ok().map(Some),
            Some(_) => None,
            None => is_data(file).then_some(None),
        };
        if let (Some(old), Some(new)) = (parsed(old), parsed(new)) {
            let (old, new) = (leaves(old.as_ref()), leaves(new.as_ref()));
            let keys: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
            for key in keys.into_iter().filter(|key| old.get(*key) != new.get(*key)) {
                let (from, to) = (old.get(key).cloned(), new.get(key).cloned());
                all.push(Change { file: file.clone(), key: Some(key.clone()), from, to });
            }
        } else {
            let hash = |text: Option<&String>| text.map(|t| Value::from(hex::encode(Sha256::digest(t))));
            all.push(Change { file: file.clone(), key: None, from: hash(old), to: hash(new) });
        }
    }
    all
}

/// Equal for proposals that end in the same difference, however it was written: what "tried before" means.
pub fn fingerprint(changes: &[Change]) -> String {
    let mut lines: Vec<String> = changes.iter().map(|c| serde_json::json!([c.file, c.key, c.to]).to_string()).collect();
    lines.sort();
    hex::encode(Sha256::digest(lines.join("\n")))
}

/// Whether all that differs is seeds: such a change can never be kept.
pub fn seed_only(changes: &[Change]) -> bool {
    let is_seed = |key: &str| {
        let last = key.rsplit('.').next().unwrap_or(key).to_ascii_lowercase();
        last == "seed" || last.ends_with("_seed") || last == "shuffle"
    };
    !changes.is_empty() && changes.iter().all(|c| c.key.as_deref().is_some_and(is_seed))
}

/// Parses YAML (1.2 booleans only) or JSON.
///
/// # Errors
/// [`Class::Agent`] with the place in the text.
pub fn parse(file: &str, text: &str) -> Result<Value> {
    if file.ends_with(".json") {
        return serde_json::from_str(text).map_err(|e| refuse(format!("{e}.")));
    }
    if text.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#')) {
        return Ok(Value::Null);
    }
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(text, options).map_err(|e| {
        let at = e.location().map(|l| format!("line {}, column {}: ", l.line(), l.column())).unwrap_or_default();
        let text = e.without_snippet().to_string();
        refuse(format!("{at}{}.", text.lines().next().unwrap_or_default().trim_end_matches('.')))
    })
}

/// The value at a dotted path.
pub fn at<'v>(value: &'v Value, key: &str) -> Option<&'v Value> {
    key.split('.').try_fold(value, |v, part| match v {
        Value::Object(map) => map.get(part),
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Whether a file is YAML or JSON, by its name.
pub(crate) fn is_data(file: &str) -> bool {
    [".yaml", ".yml", ".json"].iter().any(|end| file.ends_with(end))
}

fn check_path(file: &str) -> Result<()> {
    let parts_ok = file.split('/').all(|p| !p.is_empty() && p != "." && p != ".." && !p.eq_ignore_ascii_case(".git"));
    if !parts_ok || file.contains(['\\', '\0', '\n', '\r']) {
        return Err(refuse("the path must be relative to the workspace, with `/` and without `.` or `..`."));
    }
    Ok(())
}

/// The candidate closest to a misspelt name, where one is close.
fn nearest<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    all.map(|c| (strsim::jaro_winkler(name, c), c))
        .filter(|(s, _)| *s > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, c)| c)
}

fn replace(text: &str, old: &str, new: &str) -> Result<String> {
    match text.matches(old).count() {
        _ if old.is_empty() => Err(refuse("`old` is empty.")),
        1 => Ok(text.replacen(old, new, 1)),
        0 => Err(refuse("`old` does not occur in the file.")
            .hint("Copy the passage verbatim, spaces and line breaks included.")),
        n => {
            Err(refuse(format!("`old` occurs {n} times."))
                .hint("Take in a line before or after, so that it occurs once."))
        }
    }
}

/// Every leaf by dotted path; an empty mapping or list is a leaf. An absent tree has none.
pub(crate) fn leaves(value: Option<&Value>) -> BTreeMap<String, Value> {
    fn walk(value: &Value, path: String, out: &mut BTreeMap<String, Value>) {
        let join = |part: &str| if path.is_empty() { part.to_string() } else { format!("{path}.{part}") };
        match value {
            Value::Object(map) if !map.is_empty() => map.iter().for_each(|(k, v)| walk(v, join(k), out)),
            Value::Array(list) if !list.is_empty() => {
                list.iter().enumerate().for_each(|(i, v)| walk(v, join(&i.to_string()), out))
            }
            leaf => {
                out.insert(path, leaf.clone());
            }
        }
    }
    let mut out = BTreeMap::new();
    if let Some(value) = value {
        walk(value, String::new(), &mut out);
    }
    out
}

/// The text with one value changed.
fn set(file: &str, text: &str, key: &str, value: &Value) -> Result<String> {
    if !is_data(file) {
        return Err(refuse("`set` edits YAML and JSON files only.").hint("Use `replace` or `write`."));
    }
    if key.is_empty() || key.split('.').any(str::is_empty) {
        return Err(
            refuse(format!("`{key}` is no dotted path.")).hint("For example `optimizer.lr`, or `stages.0.sft.lr`.")
        );
    }
    let old = parse(file, text)?;
    let wanted = with_value(&old, key, value)?;
    if wanted == old {
        return Ok(text.into());
    }
    let new = splice(text, &old, key, value, file.ends_with(".json"))
        .filter(|new| parse(file, new).is_ok_and(|parsed| parsed == wanted));
    new.ok_or_else(|| {
        refuse(format!("`{key}` cannot be set without touching anything else (anchors, aliases or unusual layout)."))
            .hint("Use `replace` or `write`.")
    })
}

/// The value with the leaf at `key` changed; mappings that lack are made.
fn with_value(old: &Value, key: &str, value: &Value) -> Result<Value> {
    let mut new = old.clone();
    let mut here = &mut new;
    let mut path = String::new();
    for part in key.split('.') {
        if here.is_null() {
            if part.bytes().all(|b| b.is_ascii_digit()) {
                return Err(refuse(format!("`{path}` is no list: it has no item `{part}`."))
                    .hint("Lists grow with `replace` or `write`."));
            }
            *here = Value::Object(Map::new());
        }
        here = match here {
            Value::Object(map) => map.entry(part).or_insert(Value::Null),
            Value::Array(list) => {
                let n = list.len();
                part.parse().ok().and_then(|i: usize| list.get_mut(i)).ok_or_else(|| {
                    refuse(format!("`{path}` is a list of {n}; it has no item `{part}`."))
                        .hint("Items count from 0. Lists grow with `replace` or `write`.")
                })?
            }
            _ => return Err(refuse(format!("`{path}` is a value, not a mapping: it has no `{part}`."))),
        };
        path = if path.is_empty() { part.into() } else { format!("{path}.{part}") };
    }
    *here = value.clone();
    Ok(new)
}

/// Finds the place and writes the value there; None where the layout is beyond it. The caller checks the result.
fn splice(text: &str, old: &Value, key: &str, value: &Value, json: bool) -> Option<String> {
    let parts: Vec<&str> = key.split('.').collect();
    // The deepest node that exists, and the route to it.
    let mut node = old;
    let mut route = Vec::new();
    for part in &parts {
        let (next, component) = match node {
            Value::Object(map) => (map.get(*part), Component::Key((*part).into())),
            Value::Array(list) => (list.get(part.parse::<usize>().ok()?), Component::Index(part.parse().ok()?)),
            _ => (None, Component::Index(0)),
        };
        let Some(next) = next else { break };
        node = next;
        route.push(component);
    }
    let rest = &parts[route.len()..];
    // What the missing keys hold: {b: {c: value}} below `a`.
    let below = |keys: &[&str]| {
        keys.iter().rev().fold(value.clone(), |v, k| Value::Object(Map::from_iter([(k.to_string(), v)])))
    };
    let document = Document::new(text).ok()?;
    let splice = |from: usize, to: usize, with: &str| Some([&text[..from], with, &text[to..]].concat());

    if rest.is_empty() || node.as_object().is_none_or(|m| m.is_empty()) {
        // The value itself, or a null or empty mapping in place of which the new mapping comes.
        let with = flow(&below(rest), json);
        if route.is_empty() {
            return Some(format!(
                "{}{}\n",
                if text.is_empty() || text.ends_with('\n') { text.into() } else { format!("{text}\n") },
                with
            ));
        }
        let route = Route::from(route);
        return match document.query_exact(&route).ok()? {
            Some(found) => splice(found.location.byte_span.0, found.location.byte_span.1, &with),
            // `key:` with nothing behind it.
            None => end_of(&document, text, &route).and_then(|end| splice(end, end, &format!(" {with}"))),
        };
    }
    // A new key at the end of a mapping that has some.
    let map = node.as_object()?;
    let child =
        |k: &str| Route::from(route.iter().cloned().chain([Component::Key(k.to_string().into())]).collect::<Vec<_>>());
    let entry = format!("{}: {}", flow(&Value::from(rest[0]), json), flow(&below(&rest[1..]), json));
    let first = document.query_key_only(&child(map.keys().next()?)).ok()?.location;
    let last = end_of(&document, text, &child(map.keys().next_back()?))?;
    let in_flow = text[..first.byte_span.0].trim_end().ends_with(['{', ',']);
    if in_flow {
        return splice(last, last, &format!(", {entry}"));
    }
    // Block style: a line of its own, behind the last line of the last entry and its comment.
    let content_end = text[..last].trim_end().len();
    let line_end = text[content_end..].find('\n').map_or(text.len(), |n| content_end + n);
    splice(line_end, line_end, &format!("\n{}{entry}", " ".repeat(first.point_span.0.1)))
}

/// Where the value at a route ends; behind the colon where there is none.
fn end_of(document: &Document, text: &str, route: &Route) -> Option<usize> {
    if let Some(found) = document.query_exact(route).ok()? {
        return Some(found.location.byte_span.1);
    }
    let key = document.query_key_only(route).ok()?.location.byte_span.1;
    let colon = text[key..].find(':').filter(|n| text[key..key + n].trim().is_empty())?;
    Some(key + colon + 1)
}

/// A value as it would stand in a recipe, on one line.
pub fn show(value: &Value) -> String {
    flow(value, false)
}

/// A value on one line, as YAML or JSON.
fn flow(value: &Value, json: bool) -> String {
    match value {
        Value::Number(n) if n.is_f64() => {
            let x = n.as_f64().unwrap_or_default();
            let plain = x == 0.0 || (1e-3..1e6).contains(&x.abs());
            if plain { n.to_string() } else { format!("{x:e}") }
        }
        Value::String(s) if !json && is_plain(s) => s.clone(),
        Value::Array(list) => format!("[{}]", list.iter().map(|v| flow(v, json)).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let entry =
                |(k, v): (&String, &Value)| format!("{}: {}", flow(&Value::from(k.as_str()), json), flow(v, json));
            format!("{{{}}}", map.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        // JSON's own spelling is YAML's, too.
        other => other.to_string(),
    }
}

/// Whether a string needs no quotes in YAML: a word that no version of YAML reads as something else.
fn is_plain(s: &str) -> bool {
    let words = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    s.starts_with(|c: char| c.is_ascii_alphabetic())
        && s.chars().all(|c| c.is_ascii_alphanumeric() || "_-/.".contains(c))
        && !words.contains(&s.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const RECIPE: &str = "\
# The baseline.
model: {preset: hybrid-tiny}   # small
optimizer:
  lr: 1e-3          # the usual
  betas: [0.9, 0.95]
  # A comment of its own.
  clip: 1.0
stages:
  - sft: {task: addition, digits: 2, examples: 20000}   # teach
  - rl:
      group: 8
      ratio_cap: 5.0 # absolute
  - rl: {}
  - rl:

note: |
  free text
";

    fn files(text: &str) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("recipe/recipe.yaml".to_string(), text.to_string()),
            ("a.txt".to_string(), "one\ntwo\ntwo\n".to_string()),
        ])
    }

    fn set_in(text: &str, key: &str, value: Value) -> Result<String> {
        let edit = Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value };
        apply_edits(&files(text), &[edit]).map(|mut changed| changed.remove("recipe/recipe.yaml").unwrap().unwrap())
    }

    /// The lines that differ, old and new.
    fn lines(old: &str, new: &str) -> (Vec<String>, Vec<String>) {
        let diff = similar::TextDiff::from_lines(old, new);
        let of = |tag| {
            diff.iter_all_changes()
                .filter(|c| c.tag() == tag)
                .map(|c| c.to_string_lossy().trim_end().to_string())
                .collect()
        };
        (of(similar::ChangeTag::Delete), of(similar::ChangeTag::Insert))
    }

    #[test]
    fn a_set_changes_one_line_and_keeps_comments() {
        let cases = [
            ("optimizer.lr", json!(3e-4), "  lr: 3e-4          # the usual"),
            ("optimizer.betas", json!([0.9, 0.999]), "  betas: [0.9, 0.999]"),
            ("optimizer.betas.1", json!(0.98), "  betas: [0.9, 0.98]"),
            ("model.preset", json!("small"), "model: {preset: small}   # small"),
            ("stages.0.sft.digits", json!(3), "  - sft: {task: addition, digits: 3, examples: 20000}   # teach"),
            ("stages.1.rl.ratio_cap", json!(8), "      ratio_cap: 8 # absolute"),
        ];
        for (key, value, line) in cases {
            let new = set_in(RECIPE, key, value).unwrap();
            let (old, new) = lines(RECIPE, &new);
            assert_eq!((old.len(), new), (1, vec![line.to_string()]), "{key}");
        }
    }

    #[test]
    fn a_set_adds_what_lacks() {
        let cases = [
            ("optimizer.eps", json!(1e-15), 0, "  eps: 1e-15"),
            (
                "stages.0.sft.lr",
                json!(0.002),
                1,
                "  - sft: {task: addition, digits: 2, examples: 20000, lr: 0.002}   # teach",
            ),
            ("stages.1.rl.temperature", json!(0.8), 0, "      temperature: 0.8"),
            ("stages.2.rl.group", json!(16), 1, "  - rl: {group: 16}"),
            ("stages.3.rl.group", json!(16), 1, "  - rl: {group: 16}"),
            ("checkpoints.every", json!(50), 0, "checkpoints: {every: 50}"),
            (
                "model.norm.post.alpha",
                json!(2.5),
                1,
                "model: {preset: hybrid-tiny, norm: {post: {alpha: 2.5}}}   # small",
            ),
        ];
        for (key, value, gone, line) in cases {
            let new = set_in(RECIPE, key, value).unwrap();
            let (old, new) = lines(RECIPE, &new);
            assert_eq!((old.len(), new), (gone, vec![line.to_string()]), "{key}");
        }
    }

    #[test]
    fn sets_work_on_json_and_without_a_last_newline() {
        let json = "{\n  \"temperature\": 1.0,\n  \"stop\": [\"\\n\"]\n}\n";
        let files = BTreeMap::from([
            ("scaffold/s.json".to_string(), json.to_string()),
            ("x.yaml".to_string(), "a: 1".to_string()),
        ]);
        let set = |file: &str, key: &str, value| Edit::Set { file: file.into(), key: key.into(), value };
        let edits = [
            set("scaffold/s.json", "temperature", json!(0.7)),
            set("scaffold/s.json", "top.p", json!("yes")),
            set("x.yaml", "b", json!("yes")),
        ];
        let changed = apply_edits(&files, &edits).unwrap();
        let text = changed["scaffold/s.json"].as_ref().unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(text).unwrap(),
            json!({"temperature": 0.7, "stop": ["\n"], "top": {"p": "yes"}})
        );
        assert!(text.starts_with("{\n  \"temperature\": 0.7,\n"), "{text}");
        assert_eq!(changed["x.yaml"].as_deref(), Some("a: 1\nb: \"yes\""));
    }

    #[test]
    fn what_cannot_be_set_is_refused_with_the_reason() {
        let cases = [
            ("stages.9.rl.group", "it has no item `9`"),
            ("optimizer.lr.x", "`optimizer.lr` is a value"),
            ("new.0.lr", "it has no item `0`"),
            ("optimizer..lr", "is no dotted path"),
            ("optimizer.lr", "The edits change nothing"),
        ];
        for (key, message) in cases {
            let failure = set_in(RECIPE, key, json!(0.001)).unwrap_err();
            assert_eq!(failure.class, Class::Agent);
            assert!(failure.message.contains(message), "{key}: {}", failure.message);
        }
        let aliased = "a: &x {lr: 1}\nb: *x\n";
        assert!(set_in(aliased, "a.lr", json!(2)).unwrap_err().message.contains("without touching anything else"));
    }

    #[test]
    fn other_edits_are_exact() {
        let files = files(RECIPE);
        let replace = |old: &str, new: &str| Edit::Replace { file: "a.txt".into(), old: old.into(), new: new.into() };
        let refused = |edit: Edit| apply_edits(&files, &[edit]).unwrap_err().to_string();
        assert_eq!(apply_edits(&files, &[replace("one", "1")]).unwrap()["a.txt"].as_deref(), Some("1\ntwo\ntwo\n"));
        assert!(refused(replace("two", "2")).contains("occurs 2 times"));
        assert!(refused(replace("three", "3")).contains("does not occur"));
        assert!(refused(replace("one", "one")).contains("change nothing"));
        assert!(refused(Edit::Delete { file: "b.txt".into() }).contains("Did you mean a.txt?"));
        for file in ["../x", "/etc/passwd", "a/../b", ".git/config", "a//b", ""] {
            assert!(
                refused(Edit::Write { file: file.into(), content: "x".into() }).contains("relative to the workspace"),
                "{file}"
            );
        }
        assert!(
            refused(Edit::Write { file: "r.yaml".into(), content: "a: [1".into() }).contains("r.yaml cannot be parsed")
        );
        let undone = [replace("one", "1"), replace("1", "one")];
        assert!(apply_edits(&files, &undone).unwrap_err().message.contains("change nothing"));
        let deleted = apply_edits(&files, &[Edit::Delete { file: "a.txt".into() }]).unwrap();
        assert_eq!(deleted["a.txt"], None);
    }

    #[test]
    fn changes_see_values_not_spelling() {
        let before = files("a: {lr: 1e-3, seed: 1}\nb: [1, 2]\n");
        let after = files("# new comment\na:\n  seed: 2\n  lr: 0.001\nb: [1, 2, 3]\n");
        let changed = changes(&before, &after);
        let brief: Vec<_> = changes(&before, &after).into_iter().map(|c| (c.key.unwrap(), c.from, c.to)).collect();
        assert_eq!(brief, [("a.seed".into(), Some(json!(1)), Some(json!(2))), ("b.2".into(), None, Some(json!(3)))]);
        assert!(!seed_only(&changed) && seed_only(&changed[..1]) && !seed_only(&[]));
        let mut text = before.clone();
        text.remove("a.txt");
        let gone = changes(&before, &text);
        assert!(matches!(&gone[..], [Change { key: None, from: Some(_), to: None, .. }]), "{gone:?}");
        assert_eq!(fingerprint(&changed), fingerprint(&changed.iter().rev().cloned().collect::<Vec<_>>()));
        assert_ne!(fingerprint(&changed), fingerprint(&changed[..1]));
    }

    #[test]
    fn edits_have_one_spelling() {
        let edit: Edit =
            serde_json::from_value(json!({"op": "set", "file": "r.yaml", "key": "a", "value": 1})).unwrap();
        assert_eq!(edit.file(), "r.yaml");
        assert!(
            serde_json::from_value::<Edit>(json!({"op": "set", "file": "r.yaml", "key": "a", "value": 1, "seed": 2}))
                .is_err()
        );
    }

    proptest! {
        /// Whatever is set where, it is what is read back, or it is refused.
        #[test]
        fn a_set_is_read_back(key in 0..7usize, number in prop::num::f64::NORMAL, text in "\\PC{0,12}", kind in 0..3) {
            let key = ["optimizer.lr", "optimizer.new", "model.preset", "stages.0.sft.task", "stages.1.rl.new", "stages.3.rl.new", "top"][key];
            let value = match kind { 0 => json!(number), 1 => json!(text), _ => json!([number, {"k": text}]) };
            if let Ok(new) = set_in(RECIPE, key, value.clone()) {
                let parsed = parse("r.yaml", &new).unwrap();
                prop_assert_eq!(at(&parsed, key), Some(&value));
                prop_assert!(new.contains("# A comment of its own."));
            }
        }
    }
}
