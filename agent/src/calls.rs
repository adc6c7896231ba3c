//! The record of calls to the models that propose: one JSON line for each state of a call, in `.hone/calls/<campaign>.jsonl`, masked by
//! the client that writes it. A resumed campaign reads from it what was spent; a call that was cut off stays charged.

use crate::workspace::Workspace;
use hone_evals::meter::{Budget, Call, Meter, Outcome, Spend};
use hone_evals::remote::Recording;
use hone_runs::{Class, Failure, Result, failure::Context};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a campaign's calls are recorded.
pub fn path(workspace: &Workspace, campaign: &str) -> PathBuf {
    workspace.root().join(".hone").join("calls").join(format!("{campaign}.jsonl"))
}

/// A meter for the campaign's proposers: it holds `budget`, starts from what was spent before, and records every call.
///
/// # Errors
/// Infrastructure, where the record cannot be read or written; Integrity, where a line before the last is not a call.
pub fn meter(workspace: &Workspace, campaign: &str, budget: Budget) -> Result<Arc<Meter>> {
    let path = path(workspace, campaign);
    let failed = || format!("The record of calls {} cannot be written", path.display());
    path.parent().map_or(Ok(()), fs::create_dir_all).context(Class::Infrastructure, failed)?;
    let spent = spent(&path)?;
    let mut file = OpenOptions::new().create(true).append(true).open(&path).context(Class::Infrastructure, failed)?;
    // A line torn by a crash is closed, so that the next one stands alone.
    if !ends_with_newline(&path)? {
        file.write_all(b"\n").context(Class::Infrastructure, failed)?;
    }
    let shown = path.display().to_string();
    Ok(Meter::new(budget, spent, move |call| {
        let failed = || format!("The record of calls {shown} cannot be written");
        let mut line = serde_json::to_vec(call).context(Class::Other, failed)?;
        line.push(b'\n');
        (&file).write_all(&line).and_then(|()| file.sync_data()).context(Class::Infrastructure, failed)
    }))
}

fn ends_with_newline(path: &Path) -> Result<bool> {
    let text = fs::read(path).context(Class::Infrastructure, || format!("{} cannot be read", path.display()))?;
    Ok(text.last().is_none_or(|&byte| byte == b'\n'))
}

/// The replies that a campaign's models gave, for a replay. None where it called nobody.
///
/// # Errors
/// As [`meter`].
pub fn recording(workspace: &Workspace, campaign: &str) -> Result<Recording> {
    Ok(Recording::new(read(&path(workspace, campaign))?.into_values()))
}

/// The calls recorded at `path` by number, each in its last state.
fn read(path: &Path) -> Result<BTreeMap<u64, Call>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(e) => return Err(Failure::new(Class::Infrastructure, format!("{} cannot be read: {e}.", path.display()))),
    };
    let mut calls: BTreeMap<u64, Call> = BTreeMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        match serde_json::from_str::<Call>(line) {
            Ok(call) => drop(calls.insert(call.id, call)),
            // Torn by a crash: last in the file, or last before a process took it up again.
            Err(e) if e.is_eof() => {}
            Err(e) => {
                return Err(Failure::new(Class::Integrity, format!("Not the record of a call: {e}."))
                    .hint("move the file away to go on without it; what was spent is then counted from zero")
                    .at(format!("{}:{}", path.display(), i + 1)));
            }
        }
    }
    Ok(calls)
}

/// What the calls recorded at `path` cost. The last state of a call counts; one that is still reserved was cut off, and is charged.
fn spent(path: &Path) -> Result<Spend> {
    let calls = read(path)?;
    let mut spend = Spend { calls: calls.len() as u64, ..Spend::default() };
    for call in calls.values().filter(|call| call.outcome != Outcome::Failed) {
        let tokens = call.usage.tokens();
        spend.tokens += tokens;
        match call.usd {
            Some(usd) => spend.usd += usd,
            None => spend.unpriced_tokens += tokens,
        }
        if call.outcome != Outcome::Answered {
            spend.cut_off_tokens += tokens;
            spend.cut_off_usd += call.usd.unwrap_or(0.0);
        }
    }
    Ok(spend)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hone_evals::meter::Usage;

    fn call(id: u64, outcome: Outcome, tokens: u64, usd: Option<f64>) -> String {
        let usage = Usage { prompt_tokens: tokens, completion_tokens: 0, estimated: false };
        let call = Call {
            id,
            purpose: "propose".into(),
            model: "m".into(),
            endpoint: "http://127.0.0.1/v1".into(),
            attempt: 1,
            outcome,
            usage,
            usd,
            request: serde_json::Value::Null,
            reply: None,
            error: None,
            class: None,
        };
        serde_json::to_string(&call).unwrap()
    }

    #[test]
    fn the_last_state_counts_a_cut_off_call_stays_charged_and_a_torn_line_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c1.jsonl");
        assert_eq!(spent(&path).unwrap(), Spend::default());
        let lines = [
            call(0, Outcome::Reserved, 100, Some(1.0)),
            call(0, Outcome::Answered, 40, Some(0.5)),
            call(1, Outcome::Reserved, 70, Some(2.0)),
            call(2, Outcome::Reserved, 9, None),
            call(2, Outcome::Failed, 0, None),
            call(3, Outcome::Answered, 5, None),
        ];
        fs::write(&path, lines.join("\n") + "\n{\"id\":4,\"purp").unwrap();
        let spend = spent(&path).unwrap();
        assert_eq!((spend.calls, spend.tokens, spend.unpriced_tokens, spend.cut_off_tokens), (4, 115, 5, 70));
        assert!((spend.usd - 2.5).abs() < 1e-12 && (spend.cut_off_usd - 2.0).abs() < 1e-12);
        fs::write(&path, "nonsense\n").unwrap();
        assert_eq!(spent(&path).unwrap_err().class, Class::Integrity);
    }
}
