//! Reverse a string of random letters: `stressed>` asks for `desserts`.

use super::Problem;
use super::generated::{Generator, Sketch};
use hone_runs::{Class, Failure, Result};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// Strings of exactly `length` lower-case ASCII letters, each drawn evenly.
pub(super) struct Reverse {
    length: usize,
}

impl Reverse {
    pub(super) fn new(length: usize) -> Result<Self> {
        match length {
            2..=4096 => Ok(Self { length }),
            _ => Err(Failure::new(Class::Usage, format!("Reverse cannot have {length} letters."))
                .hint("give `length` a value from 2 to 4096")),
        }
    }
}

impl Generator for Reverse {
    fn name(&self) -> &'static str {
        "reverse"
    }

    fn parameters(&self) -> Value {
        json!({"length": self.length})
    }

    fn sketch(&self, rng: &mut ChaCha8Rng) -> Sketch {
        let text: String = (0..self.length).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect();
        let answer: String = text.chars().rev().collect();
        Sketch {
            prompt: format!("{text}>"),
            // Knowing that abc gives cba gives away that cba gives abc.
            kin: text.as_str().min(answer.as_str()).to_string(),
            fields: Map::from_iter([("text".into(), text.into())]),
            answer,
        }
    }

    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        f64::from(completion.trim() == problem.answer)
    }
}

#[cfg(test)]
mod tests {
    use crate::task::TaskSpec;
    use hone_runs::draws;
    use std::path::Path;

    #[test]
    fn answers_are_the_text_backwards() {
        let spec = TaskSpec { task: "reverse".into(), length: Some(6), ..TaskSpec::default() };
        let task = spec.build(Path::new(".")).unwrap();
        let problem = task.draw(&mut draws(1, "test", 0, 0)).unwrap();
        let text = problem.prompt.strip_suffix('>').unwrap();
        assert_eq!(text.len(), 6);
        assert_eq!(problem.answer, text.chars().rev().collect::<String>());
        assert_eq!(problem.fields["text"], text);
        assert_eq!(task.verify(&problem, &problem.answer), 1.0);
        assert_eq!(task.verify(&problem, text), 0.0);
    }
}
