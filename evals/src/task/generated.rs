//! What all tasks with made-up problems share: ids, the two zones, and the fixed list of evaluation problems. What a problem looks like
//! and which answers are right is each [`Generator`]'s own.

use super::{EVALUATION_SHARE, Problem, Task, digest, point};
use hone_runs::{Class, Failure, Result, draws};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// A problem before it has an id.
pub(super) struct Sketch {
    pub prompt: String,
    pub answer: String,
    /// Problems of equal kin lie in the same zone: knowing one gives the other away (12+34 and 34+12).
    pub kin: String,
    pub fields: Map<String, Value>,
}

/// Makes problems up and verifies answers.
pub(super) trait Generator: Send + Sync {
    fn name(&self) -> &'static str;
    /// Everything that changes which problems come, or how often.
    fn parameters(&self) -> Value;
    /// A problem of either zone.
    fn sketch(&self, rng: &mut ChaCha8Rng) -> Sketch;
    /// The reward of an answer, 0 to 1.
    fn verify(&self, problem: &Problem, completion: &str) -> f64;
}

/// A generator as a task. Problems are drawn again until one falls in the wanted zone.
pub(super) struct Generated<G>(pub G);

/// After this many draws in vain the wanted problems are held to be exhausted. With a fifth of the problems on the evaluation side,
/// a missed problem would have to be rarer than about 1 in 2,000.
const DRAWS_IN_VAIN: u64 = 20_000;

impl<G: Generator> Generated<G> {
    fn is_evaluation(&self, kin: &str) -> bool {
        point(&format!("zone/{}", self.0.name()), kin) < EVALUATION_SHARE
    }

    fn problem(&self, sketch: Sketch) -> Problem {
        let Sketch { prompt, answer, mut fields, .. } = sketch;
        fields.insert("prompt".into(), prompt.as_str().into());
        fields.insert("answer".into(), answer.as_str().into());
        Problem { id: digest(&[self.0.name(), &prompt]), prompt, answer, fields }
    }
}

impl<G: Generator> Task for Generated<G> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> Result<Problem> {
        for _ in 0..DRAWS_IN_VAIN {
            let sketch = self.0.sketch(rng);
            if !self.is_evaluation(&sketch.kin) {
                return Ok(self.problem(sketch));
            }
        }
        let message = format!("The task `{}` has too few problems: all are kept for evaluation.", self.name());
        Err(Failure::new(Class::Usage, message).hint("give it a larger size"))
    }

    /// A longer list begins with the shorter one.
    fn evaluation(&self, n: usize) -> Result<Vec<Problem>> {
        let mut rng = draws(0, &format!("evaluation/{}", self.name()), 0, 0);
        let (mut problems, mut seen, mut vain) = (Vec::new(), HashSet::new(), 0);
        while problems.len() < n && vain < DRAWS_IN_VAIN {
            let sketch = self.0.sketch(&mut rng);
            vain += 1;
            if self.is_evaluation(&sketch.kin) {
                let problem = self.problem(sketch);
                if seen.insert(problem.id.clone()) {
                    problems.push(problem);
                    vain = 0;
                }
            }
        }
        Ok(problems)
    }

    fn verify(&self, problem: &Problem, completion: &str) -> f64 {
        self.0.verify(problem, completion)
    }

    fn hash(&self) -> String {
        digest(&["generated", self.name(), &self.0.parameters().to_string(), &EVALUATION_SHARE.to_string()])
    }
}
