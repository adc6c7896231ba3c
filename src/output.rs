//! What people see: data on stdout, everything else on stderr; tables, JSON, errors with their hint.

use comfy_table::{ContentArrangement, Table, presets};
use hone_runs::{Class, Failure, Result};
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// Whether stderr may carry colour: a terminal, and `NO_COLOR` unset or empty.
pub fn colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Prints `text` to stdout. A closed pipe (`hone … | head`) ends the program quietly.
pub fn text(text: &str) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{}", text.trim_end_matches('\n')).and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}

/// Prints one JSON value to stdout: one line where it is part of a stream, indented else.
///
/// # Errors
/// When `value` has no JSON form.
pub fn json(value: &impl Serialize) -> Result<()> {
    let rendered = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::new(Class::Other, format!("The result has no JSON form: {e}.")))?;
    text(&rendered);
    Ok(())
}

/// Prints JSON where `as_json`, else what `human` renders.
///
/// # Errors
/// When `value` has no JSON form.
pub fn either(as_json: bool, value: &impl Serialize, human: impl FnOnce() -> String) -> Result<()> {
    if as_json {
        json(value)
    } else {
        text(&human());
        Ok(())
    }
}

/// A plain table: header, rows, as wide as the terminal (100 columns elsewhere).
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(120);
    }
    table.set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    table.to_string()
}

/// Prints a failure to stderr: what, where, and what to do.
pub fn failure(failure: &Failure, as_json: bool) {
    if as_json {
        let body = serde_json::json!({"error": failure, "exit_code": failure.class.exit_code()});
        eprintln!("{body}");
        return;
    }
    let (red, bold, off) = if colour() { ("\x1b[31m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
    let at = failure.at.as_deref().map(|at| format!("{bold}{at}{off}: ")).unwrap_or_default();
    eprintln!("{red}error:{off} {at}{}", failure.message);
    if let Some(hint) = &failure.hint {
        eprintln!("\n{bold}hint:{off} {hint}");
    }
}
