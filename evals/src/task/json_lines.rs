//! Questions and answers from a JSON Lines file. Which of them may be trained on is said by the suite that names the file.

use super::{Problem, Task, digest, rank};
use crate::suite::{Split, Splits};
use hone_runs::{Class, Failure, Result};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};
use std::{collections::HashSet, path::Path};

/// The items of one file, in the order of their hashes. Items are told apart by their question: of rows with the same question the
/// first counts, so none can stand on both sides of a split.
pub(crate) struct JsonLines {
    file: String,
    train: Vec<Problem>,
    evaluation: Vec<Problem>,
    hash: String,
}

impl JsonLines {
    /// Reads `file` (relative to `root`), whose bytes must have the SHA-256 `sha256`, with the keys of question and answer.
    pub(crate) fn open(
        root: &Path,
        file: &str,
        sha256: &str,
        question: &str,
        answer: &str,
        splits: &Splits,
    ) -> Result<Self> {
        let bytes = super::check_hash(root, file, sha256)?;
        let text = String::from_utf8(bytes).map_err(|_| {
            Failure::new(Class::Usage, format!("{file} is not UTF-8 text.")).hint("JSON Lines are UTF-8")
        })?;
        let (mut train, mut evaluation, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        for (line, row) in text.lines().enumerate().filter(|(_, row)| !row.trim().is_empty()) {
            let problem = problem(row, question, answer).map_err(|f| f.at(format!("{file}:{}", line + 1)))?;
            if seen.insert(problem.id.clone()) {
                let side = if splits.of(&problem.id) == Split::Train { &mut train } else { &mut evaluation };
                side.push(problem);
            }
        }
        if seen.is_empty() {
            return Err(Failure::new(Class::Usage, format!("{file} has no rows."))
                .hint("give a file with one JSON object a line"));
        }
        for side in [&mut train, &mut evaluation] {
            side.sort_by_cached_key(|problem| rank("order", &problem.id));
        }
        let hash = digest(&["json-lines", &sha256.to_ascii_lowercase(), question, answer]);
        Ok(Self { file: file.to_string(), train, evaluation, hash })
    }
}

fn problem(row: &str, question: &str, answer: &str) -> Result<Problem> {
    let usage = |message: String| Failure::new(Class::Usage, message);
    let mut fields: Map<String, Value> = serde_json::from_str(row).map_err(|e| {
        usage(format!("This row is no JSON object: {e}.")).hint("each line holds one object, such as {\"question\": …}")
    })?;
    let text = |key: &str| match fields.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
        found => {
            let what = if found.is_some() { "neither text nor a number" } else { "missing" };
            let keys = fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            Err(usage(format!("The key `{key}` is {what} in this row.")).hint(format!("its keys: {keys}")))
        }
    };
    let (prompt, answer) = (text(question)?, text(answer)?);
    fields.insert("prompt".into(), prompt.as_str().into());
    fields.insert("answer".into(), answer.as_str().into());
    Ok(Problem { id: digest(&["json-lines", &prompt]), prompt, answer, fields })
}

impl Task for JsonLines {
    fn name(&self) -> &str {
        &self.file
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Problem> {
        if self.train.is_empty() {
            return Err(Failure::new(Class::Usage, format!("{} has no train split.", self.file))
                .hint("name one in the suite: `splits: {train: 0.8, dev: 0.1, held_out: 0.1}`"));
        }
        Ok(self.train[rng.random_range(0..self.train.len() as u64) as usize].clone())
    }

    fn evaluation(&self, n: usize) -> Result<Vec<Problem>> {
        Ok(self.evaluation.iter().take(n).cloned().collect())
    }

    /// 1 where the completion is the answer, spaces around it aside. The suite's scorer stands before this.
    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        f64::from(completion.trim() == problem.answer.trim())
    }

    fn hash(&self) -> String {
        self.hash.clone()
    }
}
