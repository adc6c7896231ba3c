//! Addition of two numbers of equal length: `12+34=` asks for `46`.

use super::Problem;
use super::generated::{Generator, Sketch};
use hone_runs::{Class, Failure, Result};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// Operands have exactly `digits` digits and are drawn evenly: 10 to 99 for two digits, 0 to 9 for one.
pub(super) struct Addition {
    digits: u32,
}

impl Addition {
    pub(super) fn new(digits: usize) -> Result<Self> {
        match u32::try_from(digits) {
            // 18 digits: the largest sum still fits an i64, which every JSON reader and template can hold.
            Ok(digits @ 1..=18) => Ok(Self { digits }),
            _ => Err(Failure::new(Class::Usage, format!("Addition cannot have {digits} digits."))
                .hint("give `digits` a value from 1 to 18")),
        }
    }
}

impl Generator for Addition {
    fn name(&self) -> &'static str {
        "addition"
    }

    fn parameters(&self) -> Value {
        json!({"digits": self.digits})
    }

    fn sketch(&self, rng: &mut ChaCha8Rng) -> Sketch {
        let low = if self.digits == 1 { 0 } else { 10u64.pow(self.digits - 1) };
        let high = 10u64.pow(self.digits);
        let (a, b) = (rng.random_range(low..high), rng.random_range(low..high));
        Sketch {
            prompt: format!("{a}+{b}="),
            answer: (a + b).to_string(),
            kin: format!("{}+{}", a.min(b), a.max(b)),
            fields: Map::from_iter([("a".into(), a.into()), ("b".into(), b.into())]),
        }
    }

    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        f64::from(completion.trim() == problem.answer)
    }
}

#[cfg(test)]
mod tests {
    use crate::task::{Task, TaskSpec};
    use hone_runs::draws;
    use std::{collections::HashSet, path::Path};

    fn addition(digits: usize) -> Box<dyn Task> {
        let spec = TaskSpec { task: "addition".into(), digits: Some(digits), ..TaskSpec::default() };
        spec.build(Path::new(".")).unwrap()
    }

    #[test]
    fn problems_are_sums_of_the_asked_length() {
        let task = addition(2);
        let mut rng = draws(1, "test", 0, 0);
        for _ in 0..200 {
            let problem = task.draw(&mut rng).unwrap();
            let (a, b) = problem.prompt.trim_end_matches('=').split_once('+').unwrap();
            assert_eq!((a.len(), b.len()), (2, 2));
            assert_eq!(problem.answer, (a.parse::<u64>().unwrap() + b.parse::<u64>().unwrap()).to_string());
            assert_eq!(problem.fields["a"].to_string(), a);
            assert_eq!(task.verify(&problem, &format!(" {} ", problem.answer)), 1.0);
            assert_eq!(task.verify(&problem, &format!("{}0", problem.answer)), 0.0);
        }
    }

    #[test]
    fn training_never_sees_an_evaluation_problem_or_its_mirror() {
        let task = addition(1);
        let held: HashSet<String> = task.evaluation(1000).unwrap().into_iter().map(|p| p.prompt).collect();
        let mut drawn = HashSet::new();
        let mut rng = draws(2, "test", 0, 0);
        for _ in 0..5000 {
            drawn.insert(task.draw(&mut rng).unwrap().prompt);
        }
        assert_eq!(held.len() + drawn.len(), 100, "the two zones make up all 100 problems");
        assert!(held.is_disjoint(&drawn));
        for prompt in &held {
            let (a, b) = prompt.trim_end_matches('=').split_once('+').unwrap();
            assert!(!drawn.contains(&format!("{b}+{a}=")));
        }
    }

    #[test]
    fn evaluation_is_the_same_list_every_time_and_longer_lists_extend_it() {
        let (short, long) = (addition(3).evaluation(20).unwrap(), addition(3).evaluation(50).unwrap());
        assert_eq!(short[..], long[..20]);
        assert_eq!(long.iter().map(|p| &p.id).collect::<HashSet<_>>().len(), 50);
    }

    #[test]
    fn bad_parameters_are_refused() {
        let build = |spec: TaskSpec| spec.build(Path::new(".")).err().unwrap();
        let of = |digits, length| TaskSpec { task: "addition".into(), digits, length, ..TaskSpec::default() };
        assert!(build(of(Some(0), None)).message.contains("0 digits"));
        assert!(build(of(Some(19), None)).message.contains("19 digits"));
        assert!(build(of(None, Some(3))).message.contains("no parameter `length`"));
    }
}
