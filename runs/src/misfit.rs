//! Where a YAML document departs from a JSON Schema: the explanation that serde cannot give for enums told apart by their content
//! alone, and the refusal of keys that flattened structs let pass. Not a validator: what it does not name may still not fit.

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_saphyr::{Location, Spanned};

/// One departure and its place.
#[derive(Clone, Debug)]
pub(crate) struct Misfit {
    pub location: Location,
    pub kind: Kind,
}

/// What departs.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// A key that no alternative has.
    Key { word: String, valid: Vec<String> },
    /// A word where only others are listed.
    Value { word: String, valid: Vec<String> },
    /// A word where every alternative is a mapping.
    NotAMapping { word: String, keys: Vec<String> },
    /// A key that is needed beside those which are there.
    Missing { key: String },
}

/// The document with the place of every key and value.
#[derive(Debug)]
pub(crate) enum Node {
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

/// The first departure of `document` from `schema`, in the document's order.
pub(crate) fn first(document: &Spanned<Node>, schema: &Value) -> Option<Misfit> {
    walk(schema, &[schema], document)
}

/// All alternatives that `schema` offers, references followed. The depth of a recursive type ends with the document's, which drives
/// the walk; a schema that refers to itself without consuming a key does not come out of a Rust type.
fn alternatives<'a>(root: &'a Value, schema: &'a Value, into: &mut Vec<&'a Value>) {
    let target =
        schema["$ref"].as_str().and_then(|name| name.strip_prefix('#')).and_then(|pointer| root.pointer(pointer));
    let nested = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema[key].as_array()).flatten();
    for alternative in target.into_iter().chain(nested) {
        alternatives(root, alternative, into);
    }
    into.push(schema);
}

fn walk(root: &Value, schemas: &[&Value], node: &Spanned<Node>) -> Option<Misfit> {
    let mut all = Vec::new();
    schemas.iter().for_each(|schema| alternatives(root, schema, &mut all));
    match &node.value {
        Node::Map(entries) => mapping(root, &all, node.referenced, entries),
        Node::List(items) => {
            let inner: Vec<&Value> =
                all.iter().map(|schema| &schema["items"]).filter(|items| items.is_object()).collect();
            if inner.is_empty() { None } else { items.iter().find_map(|item| walk(root, &inner, item)) }
        }
        Node::Text(word) => text(&all, word).map(|kind| Misfit { location: node.referenced, kind }),
        Node::Other => None,
    }
}

fn mapping(
    root: &Value,
    all: &[&Value],
    location: Location,
    entries: &[(Spanned<String>, Spanned<Node>)],
) -> Option<Misfit> {
    // `true` is the schema of whatever there is.
    if all.iter().any(|schema| **schema == true || schema["additionalProperties"] == true) {
        return None;
    }
    let open: Vec<&Value> =
        all.iter().map(|schema| &schema["additionalProperties"]).filter(|s| s.is_object()).collect();
    let valid = keys(all);
    let within = entries.iter().find_map(|(key, value)| {
        let word = &key.value;
        let inner: Vec<&Value> = all.iter().filter_map(|schema| schema["properties"].get(word)).collect();
        match (inner.is_empty(), open.is_empty()) {
            (false, _) => walk(root, &inner, value),
            (true, false) => walk(root, &open, value),
            (true, true) if valid.is_empty() => None,
            (true, true) => {
                let kind = Kind::Key { word: word.clone(), valid: valid.clone() };
                Some(Misfit { location: key.referenced, kind })
            }
        }
    });
    within.or_else(|| missing(all, entries).map(|key| Misfit { location, kind: Kind::Missing { key } }))
}

/// The key that the first alternative still needs, of those that have all the keys there are; none where one of them needs none.
fn missing(all: &[&Value], entries: &[(Spanned<String>, Spanned<Node>)]) -> Option<String> {
    let has = |schema: &Value, key: &str| schema["properties"].get(key).is_some();
    let stands = |key: &str| entries.iter().any(|(entry, _)| entry.value == key);
    let fitting = all
        .iter()
        .filter(|schema| schema["properties"].is_object() && entries.iter().all(|(key, _)| has(schema, &key.value)));
    let needs: Vec<Option<&str>> = fitting
        .map(|schema| {
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).find(|key| !stands(key))
        })
        .collect();
    if needs.iter().any(Option::is_none) { None } else { needs.into_iter().flatten().next().map(str::to_string) }
}

fn keys(all: &[&Value]) -> Vec<String> {
    all.iter()
        .filter_map(|schema| schema["properties"].as_object())
        .flat_map(|properties| properties.keys().cloned())
        .collect()
}

fn text(all: &[&Value], word: &str) -> Option<Kind> {
    let is = |schema: &Value, name: &str| {
        let kind = &schema["type"];
        kind == name || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == name))
    };
    let listed = |schema: &Value| schema.get("enum").is_some() || schema.get("const").is_some();
    if all.iter().any(|schema| **schema == true || is(schema, "string") && !listed(schema)) {
        return None;
    }
    let words =
        all.iter().flat_map(|schema| schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")));
    let valid: Vec<String> = words.filter_map(|value| value.as_str().map(str::to_string)).collect();
    if !valid.is_empty() {
        return (!valid.iter().any(|known| known == word)).then(|| Kind::Value { word: word.to_string(), valid });
    }
    let mut typed = all.iter().filter(|schema| schema.get("type").is_some()).peekable();
    let mappings = typed.peek().is_some() && typed.all(|schema| is(schema, "object"));
    mappings.then(|| Kind::NotAMapping { word: word.to_string(), keys: keys(all) })
}
