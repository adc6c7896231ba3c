//! What people see: data on stdout, everything else on stderr; tables, JSON, errors with their hint.

use comfy_table::{ColumnConstraint, ContentArrangement, Table, presets};
use hone_agent::digest::printable;
use hone_runs::{Class, Failure, Result};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// Whether stderr may carry colour: a terminal, and `NO_COLOR` unset or empty.
pub fn colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Standard error that may be gone, with its terminal or its reader: what cannot be shown is lost, and the work goes on.
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Says `text` on stderr, without what would drive the terminal.
pub fn say(text: &str) {
    let _ = Stderr.write_all(format!("{}\n", printable(text)).as_bytes());
}

/// The error of a write to a terminal that was closed, Linux and macOS alike.
const EIO: i32 = 5;

/// Prints `text` to stdout, without what would drive the terminal. A closed pipe (`hone … | head`) or terminal ends the program quietly.
pub fn text(text: &str) {
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", printable(text.trim_end_matches('\n'))).and_then(|()| out.flush()) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe || e.raw_os_error() == Some(EIO) => std::process::exit(0),
        Err(e) => {
            say(&format!("error: Cannot write to standard output: {e}."));
            std::process::exit(Class::Infrastructure.exit_code().into());
        }
    }
}

/// JSON with every character that [`printable`] would remove as an escape: the same value, and nothing that drives a terminal.
fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        let mut bytes = [0; 4];
        match c.encode_utf8(&mut bytes) {
            shown if c != '\n' && printable(shown) != *shown => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            shown => out.push_str(shown),
        }
    }
    out
}

/// Prints one JSON value to stdout, indented.
///
/// # Errors
/// When `value` has no JSON form.
pub fn json(value: &impl Serialize) -> Result<()> {
    rendered(serde_json::to_string_pretty(value))
}

/// Prints one JSON value of a stream to stdout, in a line.
///
/// # Errors
/// When `value` has no JSON form.
pub fn json_line(value: &impl Serialize) -> Result<()> {
    rendered(serde_json::to_string(value))
}

fn rendered(json: serde_json::Result<String>) -> Result<()> {
    let json = json.map_err(|e| Failure::new(Class::Other, format!("The result has no JSON form: {e}.")))?;
    text(&escaped(&json));
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

/// A plain table: header, rows, as wide as the terminal (120 columns elsewhere).
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    wrapping(&[], header, rows)
}

/// The same, where only the columns at `wrap` (all, where there are none) are broken into lines to fit.
pub fn wrapping(wrap: &[usize], header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(120);
    }
    table.set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        if !wrap.is_empty() && !wrap.contains(&i) {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
    table.to_string()
}

/// Columns of the terminal; 120 elsewhere.
pub fn width() -> usize {
    let terminal = if std::io::stdout().is_terminal() { Table::new().width() } else { None };
    terminal.map_or(120, usize::from)
}

/// Prints a failure to stderr: what, where, and what to do.
pub fn failure(failure: &Failure, as_json: bool) {
    if as_json {
        let body = serde_json::json!({"error": failure, "exit_code": failure.class.exit_code()});
        say(&escaped(&body.to_string()));
        return;
    }
    let (red, bold, off) = if colour() { ("\x1b[31m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
    let at = failure.at.as_deref().map(|at| format!("{bold}{}{off}: ", printable(at))).unwrap_or_default();
    let hint =
        failure.hint.as_deref().map(|hint| format!("\n{bold}hint:{off} {}\n", printable(hint))).unwrap_or_default();
    let all = format!("{red}error:{off} {at}{}\n{hint}", printable(&failure.message));
    let _ = Stderr.write_all(all.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_its_values_and_drives_no_terminal() {
        let value = serde_json::json!({"a": "\u{1b}[2J\u{9b}31m\u{202e}x\u{7f}\t é 漢"});
        let shown = escaped(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!shown.contains(['\u{1b}', '\u{9b}', '\u{202e}', '\u{7f}']) && shown.contains("é 漢"), "{shown}");
        assert_eq!(printable(&shown), shown);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
