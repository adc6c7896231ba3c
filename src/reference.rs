//! The reference pages of the book, rendered from the JSON Schemas (one table a type, one row a key) and from the command line (one
//! section a command, one row an argument).

use clap::{Arg, Command};
use serde_json::{Map, Value};
use std::fmt::Write;

/// Renders a schema as Markdown: the root's keys first, then each named type it refers to, in the order of their names.
pub fn markdown(title: &str, schema: &Value) -> String {
    let mut out = format!("# {title}\n\n");
    if let Some(text) = schema["description"].as_str() {
        let _ = writeln!(out, "{text}\n");
    }
    keys(&mut out, schema);
    if let Some(definitions) = schema["$defs"].as_object() {
        let mut names: Vec<_> = definitions.keys().collect();
        names.sort();
        for name in names {
            let definition = &definitions[name];
            let _ = writeln!(out, "## {name}\n");
            if let Some(text) = definition["description"].as_str() {
                let _ = writeln!(out, "{text}\n");
            }
            keys(&mut out, definition);
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// The keys of an object, the alternatives of an enum, or the type itself.
fn keys(out: &mut String, schema: &Value) {
    if let Some(properties) = schema["properties"].as_object().filter(|p| !p.is_empty()) {
        object(out, properties, schema["required"].as_array());
    }
    for alternatives in ["oneOf", "anyOf"].iter().filter_map(|k| schema[*k].as_array()) {
        let _ = writeln!(out, "One of:\n");
        for alternative in alternatives {
            let _ = writeln!(out, "- {}{}", kind(alternative), describe(alternative));
        }
        out.push('\n');
        for alternative in alternatives.iter().filter(|a| is_large_object(a)) {
            keys(out, alternative);
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        let _ = writeln!(out, "One of: {}.\n", list(values));
    }
}

fn is_large_object(schema: &Value) -> bool {
    schema["properties"].as_object().is_some_and(|p| p.len() > 1)
}

fn object(out: &mut String, properties: &Map<String, Value>, required: Option<&Vec<Value>>) {
    let _ = writeln!(out, "| key | type | default | what it is |\n|---|---|---|---|");
    for (key, schema) in properties {
        let needed = required.is_some_and(|r| r.iter().any(|k| k == key));
        let default = match schema.get("default") {
            Some(Value::Null) | None if needed => "required".to_owned(),
            Some(Value::Null) | None => String::new(),
            Some(value) => format!("`{value}`"),
        };
        let tunable = schema.get("x-tunable").map(range).unwrap_or_default();
        let text = describe(schema).trim_start_matches(": ").to_owned();
        let _ = writeln!(out, "| `{key}` | {} | {} | {text}{tunable} |", cell(&kind(schema)), cell(&default));
    }
    out.push('\n');
}

/// What the search proposer may do with the key.
fn range(tunable: &Value) -> String {
    match tunable["choices"].as_array() {
        Some(choices) => format!(" *Tunable: {}.*", list(choices)),
        None => format!(
            " *Tunable: {} to {}, {}.*",
            tunable["low"],
            tunable["high"],
            tunable["scale"].as_str().unwrap_or("linear")
        ),
    }
}

fn describe(schema: &Value) -> String {
    let text = schema["description"].as_str().unwrap_or_default().replace('\n', " ");
    if text.is_empty() { String::new() } else { format!(": {}", cell(&text)) }
}

/// A type in a few words, with a link where it has a section of its own.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|r| r.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(value) = schema.get("const") {
        return format!("`{}`", bare(value));
    }
    if let Some(values) = schema["enum"].as_array() {
        return list(values);
    }
    if let Some(alternatives) = ["anyOf", "oneOf", "allOf"].iter().find_map(|k| schema[*k].as_array()) {
        let parts: Vec<_> = alternatives.iter().filter(|a| a["type"] != "null").map(kind).collect();
        return parts.join(" or ");
    }
    match &schema["type"] {
        Value::String(name) if name == "array" => match schema.get("items") {
            Some(items) => format!("list of {}", kind(items)),
            None => "list".to_owned(),
        },
        Value::String(name) if name == "object" => match schema["properties"].as_object() {
            Some(p) if p.len() == 1 => {
                let (key, value) = p.iter().next().expect("one entry");
                format!("`{key}:` {}", kind(value))
            }
            Some(_) => "mapping (below)".to_owned(),
            None => "mapping".to_owned(),
        },
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            names.iter().filter_map(Value::as_str).filter(|n| *n != "null").collect::<Vec<_>>().join(" or ")
        }
        _ => "any".to_owned(),
    }
}

fn list(values: &[Value]) -> String {
    values.iter().map(|v| format!("`{}`", bare(v))).collect::<Vec<_>>().join(", ")
}

fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Renders the command line as Markdown: every command that a person types, in the order of the help.
pub fn commands(root: &mut Command) -> String {
    root.build();
    let mut out = format!("# {}\n\n{}.\n\nEvery command takes:\n\n", root.get_name(), about(root));
    arguments(&mut out, root.get_arguments().filter(|arg| arg.is_global_set()));
    root.get_subcommands().for_each(|command| section(&mut out, command, root.get_name()));
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

fn section(out: &mut String, command: &Command, above: &str) {
    if command.is_hide_set() || command.get_name() == "help" {
        return;
    }
    let name = format!("{above} {}", command.get_name());
    if command.has_subcommands() {
        return command.get_subcommands().for_each(|below| section(out, below, &name));
    }
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim();
    let _ = writeln!(out, "## {name}\n\n{}.\n\n```console\n$ {usage}\n```\n", about(command));
    let of_its_own =
        |arg: &&Arg| !arg.is_global_set() && !arg.is_hide_set() && arg.get_id() != "help" && arg.get_id() != "version";
    arguments(out, command.get_arguments().filter(of_its_own));
}

fn about(command: &Command) -> String {
    command.get_about().map(|about| about.to_string()).unwrap_or_default()
}

fn arguments<'a>(out: &mut String, arguments: impl Iterator<Item = &'a Arg>) {
    let mut arguments = arguments.peekable();
    if arguments.peek().is_none() {
        return;
    }
    let _ = writeln!(out, "| argument | default | what it is |\n|---|---|---|");
    for arg in arguments {
        let default: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = match default.join(" ") {
            _ if !arg.get_action().takes_values() => String::new(),
            none if none.is_empty() && arg.is_required_set() => "required".into(),
            none if none.is_empty() => none,
            some => format!("`{some}`"),
        };
        let values: Vec<_> = arg.get_possible_values().iter().map(|v| format!("`{}`", v.get_name())).collect();
        let values = match &values[..] {
            [] => String::new(),
            _ if !arg.get_action().takes_values() => String::new(),
            some => format!(" ({})", some.join(", ")),
        };
        let help = arg.get_help().map(|help| help.to_string()).unwrap_or_default();
        let _ = writeln!(out, "| `{}` | {default} | {}{values} |", cell(&arg.to_string()), cell(&help));
    }
    out.push('\n');
}
