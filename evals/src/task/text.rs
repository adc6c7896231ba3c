//! Plain text: predict the next token of any UTF-8 file. The first part of the file is trained on and the last evaluated, so the two
//! are disjoint in place; a text that repeats itself may still hold the same words in both.

use super::{EVALUATION_SHARE, Problem, Task, digest, rank};
use hone_runs::{Class, Failure, Result};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::Map;
use std::{collections::HashSet, path::Path};

/// A problem is a passage: no prompt, and the passage as its answer.
pub(super) struct Text {
    train: String,
    evaluation: String,
    /// Bytes a passage, or a few less so as not to cut a character.
    length: usize,
    hash: String,
}

impl Text {
    /// Reads `file`, which is relative to `root`.
    pub(super) fn open(root: &Path, file: &str, length: usize) -> Result<Self> {
        if length < 8 {
            return Err(Failure::new(Class::Usage, format!("Passages of {length} bytes are too short."))
                .hint("give `length` a value of 8 or more (bytes a passage)"));
        }
        let bytes = super::read(root, file)?;
        let text = String::from_utf8(bytes).map_err(|e| {
            Failure::new(Class::Usage, format!("{file} is not UTF-8 text (byte {}).", e.utf8_error().valid_up_to()))
                .hint("the task `text` reads UTF-8 files")
        })?;
        let cut = text.ceil_char_boundary((text.len() as f64 * (1.0 - EVALUATION_SHARE)) as usize);
        let (train, evaluation) = text.split_at(cut);
        if train.len() < length || evaluation.len() < 2 * length {
            let message = format!("{file} is too short: {} bytes for passages of {length}.", text.len());
            return Err(Failure::new(Class::Usage, message).hint("give a longer file or a smaller `length`"));
        }
        let hash = digest(&["text", &digest(&[&text]), &length.to_string(), &EVALUATION_SHARE.to_string()]);
        Ok(Self { train: train.to_string(), evaluation: evaluation.to_string(), length, hash })
    }

    fn passage(text: &str) -> Problem {
        let fields = Map::from_iter([
            ("prompt".into(), "".into()),
            ("answer".into(), text.into()),
            ("text".into(), text.into()),
        ]);
        Problem { id: digest(&["text", text]), prompt: String::new(), answer: text.to_string(), fields }
    }
}

impl Task for Text {
    fn name(&self) -> &str {
        "text"
    }

    /// A passage that starts anywhere in the train part.
    fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Problem> {
        let last = self.train.len() - self.length;
        let start = self.train.floor_char_boundary(rng.random_range(0..=last as u64) as usize);
        let end = self.train.floor_char_boundary(start + self.length);
        Ok(Self::passage(&self.train[start..end]))
    }

    /// The evaluation part cut into consecutive passages, in the order of their hashes: a shorter list is a sample of the whole part.
    fn evaluation(&self, n: usize) -> Result<Vec<Problem>> {
        let (mut passages, mut seen, mut rest) = (Vec::new(), HashSet::new(), self.evaluation.as_str());
        while !rest.is_empty() {
            let (passage, tail) = rest.split_at(rest.floor_char_boundary(self.length));
            let problem = Self::passage(passage);
            if seen.insert(problem.id.clone()) {
                passages.push(problem);
            }
            rest = tail;
        }
        passages.sort_by_cached_key(|passage| rank("order", &passage.id));
        passages.truncate(n);
        Ok(passages)
    }

    /// 1 where the passage is reproduced word for word. Suites score text by its likelihood instead.
    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        f64::from(completion == problem.answer)
    }

    fn hash(&self) -> String {
        self.hash.clone()
    }
}

#[cfg(test)]
mod tests {
    use crate::task::{Task, TaskSpec};
    use hone_runs::{Class, draws};

    fn text(content: &[u8], length: usize) -> hone_runs::Result<Box<dyn Task>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.txt"), content).unwrap();
        let file = Some("t.txt".into());
        TaskSpec { task: "text".into(), length: Some(length), file, ..TaskSpec::default() }.build(dir.path())
    }

    #[test]
    fn train_and_evaluation_are_disjoint_parts_of_the_file() {
        let content: String = (0..2000).map(|i| format!("Zeile {i} über Bäume.\n")).collect();
        let task = text(content.as_bytes(), 64).unwrap();
        let cut = content.len() * 8 / 10;
        let mut rng = draws(1, "test", 0, 0);
        for _ in 0..500 {
            let passage = task.draw(&mut rng).unwrap().answer;
            assert!(passage.len() <= 64 && passage.len() > 58);
            assert!(content.find(&passage).unwrap() + passage.len() <= cut + 4);
        }
        let passages = task.evaluation(usize::MAX).unwrap();
        assert!(passages.iter().all(|p| content.rfind(&p.answer).unwrap() >= cut));
        assert_eq!(
            passages.iter().map(|p| p.answer.len()).sum::<usize>(),
            content.len() - content.ceil_char_boundary(cut)
        );
    }

    #[test]
    fn unusable_files_are_refused() {
        assert!(text(&[0xff; 4096], 64).err().unwrap().message.contains("not UTF-8"));
        assert!(text(b"short", 64).err().unwrap().message.contains("too short"));
        let missing = TaskSpec { task: "text".into(), file: Some("none.txt".into()), ..TaskSpec::default() };
        assert_eq!(missing.build(std::path::Path::new("/nowhere")).err().unwrap().class, Class::Usage);
    }
}
