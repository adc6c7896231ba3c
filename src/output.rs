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

/// Bytes as people read them: in the largest binary unit that leaves a whole number, with a decimal where it says something.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = if count == 0 { 0 } else { count.ilog2() as usize / 10 };
    let value = count as f64 / (1u64 << (10 * power)) as f64;
    if power == 0 || value >= 100.0 {
        format!("{value:.0} {}", UNITS[power])
    } else {
        format!("{value:.1} {}", UNITS[power])
    }
}

/// A count as people read it: three digits, in thousands, millions and so on.
pub fn count(count: u64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "B", "T", "P", "E"];
    let power = if count == 0 { 0 } else { count.ilog10() as usize / 3 };
    let value = count as f64 / 1000f64.powi(power as i32);
    let decimals = if power == 0 { 0 } else { 2usize.saturating_sub(value.log10() as usize) };
    format!("{value:.decimals$}{}", UNITS[power])
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
    fn bytes_have_a_unit_that_people_read() {
        let of = [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (u64::MAX, "16.0 EiB")];
        for (count, shown) in of {
            assert_eq!(bytes(count), shown);
        }
    }

    #[test]
    fn counts_have_three_digits() {
        let of =
            [(0, "0"), (999, "999"), (1000, "1.00k"), (118_464, "118k"), (30_500_000, "30.5M"), (u64::MAX, "18.4E")];
        for (number, shown) in of {
            assert_eq!(count(number), shown);
        }
    }

    #[test]
    fn json_keeps_its_values_and_drives_no_terminal() {
        let value = serde_json::json!({"a": "\u{1b}[2J\u{9b}31m\u{202e}x\u{7f}\t é 漢"});
        let shown = escaped(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!shown.contains(['\u{1b}', '\u{9b}', '\u{202e}', '\u{7f}']) && shown.contains("é 漢"), "{shown}");
        assert_eq!(printable(&shown), shown);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
