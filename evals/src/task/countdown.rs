//! Countdown: reach a target from given numbers. `3 5 7 2 > 24=` asks for an arithmetic expression such as `3*7+5-2`.
//!
//! Each number must be used exactly once, as in TinyZero's task (the television game lets numbers unused). Operators are + - * / and
//! parentheses; intermediate results may be negative or fractions. There are mostly many right answers; every problem has at least one.

use super::generated::{Generator, Sketch};
use super::{Problem, expression};
use hone_runs::{Class, Failure, Result};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// Numbers lie in 1..=NUMBER_MAX and targets in 1..=TARGET_MAX: small enough for a tiny model to learn.
const NUMBER_MAX: i64 = 9;
const TARGET_MAX: i64 = 99;

/// Problems of exactly `length` numbers.
pub(super) struct Countdown {
    length: usize,
}

/// A part of the solution under construction: its value, its text, and the precedence of its outermost operator (1 for + and -, 2 for
/// * and /, 3 for a number).
struct Part {
    value: i64,
    text: String,
    precedence: u8,
}

impl Countdown {
    pub(super) fn new(length: usize) -> Result<Self> {
        match length {
            2..=8 => Ok(Self { length }),
            _ => Err(Failure::new(Class::Usage, format!("Countdown cannot have {length} numbers."))
                .hint("give `length` a value from 2 to 8")),
        }
    }

    /// Joins all `numbers` with random operators in a random order; None where the target would be out of range. As in the game, the
    /// solution's intermediate results are positive whole numbers.
    fn solution(numbers: &[i64], rng: &mut ChaCha8Rng) -> Option<Part> {
        let mut parts: Vec<Part> =
            numbers.iter().map(|&value| Part { value, text: value.to_string(), precedence: 3 }).collect();
        while parts.len() > 1 {
            let a = parts.swap_remove(rng.random_range(0..parts.len() as u64) as usize);
            let b = parts.swap_remove(rng.random_range(0..parts.len() as u64) as usize);
            let operator = ['+', '-', '*', '/'][rng.random_range(0..4u64) as usize];
            parts.push(join(&a, operator, &b)?);
        }
        parts.pop().filter(|part| (1..=TARGET_MAX).contains(&part.value))
    }
}

/// `a operator b` with no more parentheses than it needs.
fn join(a: &Part, operator: char, b: &Part) -> Option<Part> {
    let (value, precedence) = match operator {
        '+' => (a.value.checked_add(b.value)?, 1),
        '-' if a.value > b.value => (a.value - b.value, 1),
        '*' => (a.value.checked_mul(b.value)?, 2),
        '/' if a.value % b.value == 0 => (a.value / b.value, 2),
        _ => return None,
    };
    let bracketed = |part: &Part, needed: bool| if needed { format!("({})", part.text) } else { part.text.clone() };
    let left = bracketed(a, a.precedence < precedence);
    // a-(b-c) and a/(b*c) need theirs; a+(b-c) and a*(b/c) do not.
    let strict = matches!(operator, '-' | '/');
    let right = bracketed(b, b.precedence < precedence || (strict && b.precedence == precedence));
    Some(Part { value, text: format!("{left}{operator}{right}"), precedence })
}

impl Generator for Countdown {
    fn name(&self) -> &'static str {
        "countdown"
    }

    fn parameters(&self) -> Value {
        json!({"length": self.length, "number_max": NUMBER_MAX, "target_max": TARGET_MAX, "use": "exactly once"})
    }

    fn sketch(&self, rng: &mut ChaCha8Rng) -> Sketch {
        loop {
            let numbers: Vec<i64> = (0..self.length).map(|_| rng.random_range(1..=NUMBER_MAX)).collect();
            let Some(solution) = Self::solution(&numbers, rng) else { continue };
            let listed = spaced(&numbers);
            let mut sorted = numbers;
            sorted.sort_unstable();
            let target = solution.value;
            return Sketch {
                prompt: format!("{listed} > {target}="),
                answer: solution.text,
                kin: format!("{} > {target}", spaced(&sorted)),
                fields: Map::from_iter([("numbers".into(), listed.into()), ("target".into(), target.into())]),
            };
        }
    }

    /// `3*7+5-2` and `3*7+5-2=24` are both taken.
    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        let Some(target) = problem.fields.get("target").and_then(Value::as_i64) else { return 0.0 };
        let Some(listed) = problem.fields.get("numbers").and_then(Value::as_str) else { return 0.0 };
        let (text, claimed) = completion.split_once('=').unwrap_or((completion, ""));
        if !claimed.trim().is_empty() && claimed.trim() != target.to_string() {
            return 0.0;
        }
        let Some(found) = expression::evaluate(text) else { return 0.0 };
        let mut used = found.numbers;
        let mut given: Vec<i64> = listed.split(' ').filter_map(|n| n.parse().ok()).collect();
        used.sort_unstable();
        given.sort_unstable();
        f64::from(used == given && found.value == expression::Ratio::whole(target))
    }
}

fn spaced(numbers: &[i64]) -> String {
    numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use crate::task::{Task, TaskSpec};
    use hone_runs::draws;
    use std::path::Path;

    fn countdown(length: usize) -> Box<dyn Task> {
        TaskSpec { task: "countdown".into(), length: Some(length), ..TaskSpec::default() }
            .build(Path::new("."))
            .unwrap()
    }

    #[test]
    fn every_problem_is_solved_by_its_answer() {
        for length in 2..=8 {
            let task = countdown(length);
            for problem in task.evaluation(100).unwrap() {
                assert_eq!(task.verify(&problem, &problem.answer), 1.0, "{} {}", problem.prompt, problem.answer);
            }
        }
    }

    #[test]
    fn other_solutions_are_right_and_cheats_are_wrong() {
        let task = countdown(4);
        let mut problem = task.draw(&mut draws(1, "test", 0, 0)).unwrap();
        problem.fields["numbers"] = "3 5 7 2".into();
        problem.fields["target"] = 24.into();
        for right in ["3*7+5-2", "3 * 7 + (5 - 2)", "5-2+7*3", "3*7+5-2=24", " 3*7+5-2 = 24 "] {
            assert_eq!(task.verify(&problem, right), 1.0, "{right}");
        }
        // Wrong value, a number left out, one used twice, one of the model's own, joined digits, nonsense, a false claim.
        for wrong in [
            "3*7+5+2",
            "3*7+5-2-0",
            "24",
            "3*(7+2-1)",
            "3*7+5-2=25",
            "35-7-2-2",
            "",
            "=24",
            "3*7+5-",
            "(3*7+5-2",
            "0/0",
        ] {
            assert_eq!(task.verify(&problem, wrong), 0.0, "{wrong}");
        }
    }
}
