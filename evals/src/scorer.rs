//! Scorers: is a completion the right answer? Text comes from models and is never trusted: nothing in it can make a scorer panic or run
//! long. Not for tasks that verify their own answers, which [`Scoring::Native`] stands for.

use hone_runs::{Class, Failure, Result};
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// How a suite's task is scored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Scoring {
    /// The task's own verifier: the default for native tasks. For files of questions it is the same as `exact`.
    #[default]
    Native,
    /// The completion is the answer, spaces around both aside. The default for files of questions.
    Exact,
    /// The completion's number (the first after the last `####`, else the last) equals the answer's.
    Numeric,
    /// This pattern's last match in the completion (its first group, where it has one) is the answer.
    Regex(String),
    /// Mean loss a token and bits a byte of the text itself: the default, and the only one, for `text`.
    Likelihood,
}

/// A scorer, ready to use.
#[derive(Clone, Debug)]
pub(crate) enum Scorer {
    Native,
    Exact,
    Numeric,
    Regex(Regex),
    Likelihood,
}

impl Scorer {
    /// # Errors
    /// When a pattern is no regular expression.
    pub(crate) fn new(scoring: &Scoring) -> Result<Self> {
        Ok(match scoring {
            Scoring::Native => Self::Native,
            Scoring::Exact => Self::Exact,
            Scoring::Numeric => Self::Numeric,
            Scoring::Likelihood => Self::Likelihood,
            Scoring::Regex(pattern) => Self::Regex(RegexBuilder::new(pattern).build().map_err(|e| {
                Failure::new(
                    Class::Usage,
                    format!("The scorer's pattern is no regular expression: {}.", last_line(&e.to_string())),
                )
                .hint("the syntax is that of Rust's regex crate: no look-around, no back-references")
            })?),
        })
    }

    /// Whether `answer` is one that a completion can meet. An answer that nothing can meet would be scored as wrong for ever.
    pub(crate) fn admits(&self, answer: &str) -> bool {
        match self {
            Self::Numeric => number(answer).is_some(),
            Self::Exact | Self::Regex(_) => !answer.trim().is_empty(),
            Self::Native | Self::Likelihood => true,
        }
    }

    /// 1 right, 0 wrong; None for the scorers that compare no texts.
    pub(crate) fn score(&self, answer: &str, completion: &str) -> Option<f64> {
        let right = match self {
            Self::Native | Self::Likelihood => return None,
            Self::Exact => completion.trim() == answer.trim(),
            Self::Numeric => match (number(completion), number(answer)) {
                (Some(found), Some(wanted)) => found.equals(&wanted),
                _ => false,
            },
            Self::Regex(pattern) => pattern
                .captures_iter(completion)
                .last()
                .and_then(|found| found.get(1).or_else(|| found.get(0)))
                .is_some_and(|found| found.as_str().trim() == answer.trim()),
        };
        Some(f64::from(right))
    }
}

fn last_line(text: &str) -> &str {
    text.lines().last().unwrap_or_default().trim_start_matches("error: ")
}

/// A number as written, commas taken out: `-1234.50`, `3/4`.
#[derive(Debug, PartialEq)]
struct Number(String);

impl Number {
    fn value(&self) -> Option<f64> {
        let parse = |text: &str| text.parse::<f64>().ok().filter(|x| x.is_finite());
        match self.0.split_once('/') {
            None => parse(&self.0),
            Some((over, under)) => Some(parse(over)? / parse(under)?).filter(|x| x.is_finite()),
        }
    }

    /// Whole numbers are compared digit by digit, whatever their length; others to nine digits, so that 0.333333333 is 1/3.
    fn equals(&self, other: &Self) -> bool {
        if let (Some(a), Some(b)) = (self.whole(), other.whole()) {
            return a == b;
        }
        match (self.value(), other.value()) {
            (Some(a), Some(b)) => (a - b).abs() <= 1e-9 * a.abs().max(b.abs()),
            _ => false,
        }
    }

    /// Sign and digits of a whole number: `-007.00` is (true, "7").
    fn whole(&self) -> Option<(bool, &str)> {
        let (digits, fraction) = self.0.split_once('.').unwrap_or((&self.0, ""));
        let (negative, digits) = digits.strip_prefix('-').map_or((false, digits), |digits| (true, digits));
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) || !fraction.bytes().all(|b| b == b'0') {
            return None;
        }
        let digits = digits.trim_start_matches('0');
        Some((negative && !digits.is_empty(), digits))
    }
}

/// Digits with or without commas at the thousands, a fraction after a point, an exponent; or two such with a slash.
static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    let unsigned = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?";
    Regex::new(&format!(r"([-−]?)\$?({unsigned}(?:/{unsigned})?)")).expect("a constant pattern")
});

/// The number that `text` gives as its answer: the first after the last `####` (GSM8K's mark), else the last.
fn number(text: &str) -> Option<Number> {
    let found = match text.rsplit_once("####") {
        Some((_, marked)) => NUMBER.captures_iter(marked).next().map(|found| (marked, found)),
        None => NUMBER.captures_iter(text).last().map(|found| (text, found)),
    };
    let (text, found) = found?;
    // A minus right after a word, a digit or a bracket takes away: 10-3 ends in 3.
    let before = text[..found.get(0)?.start()].chars().next_back();
    let sign = if found[1].is_empty() || before.is_some_and(|c| c.is_alphanumeric() || c == ')') { "" } else { "-" };
    Some(Number(format!("{sign}{}", found[2].replace(',', ""))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn score(scoring: Scoring, answer: &str, completion: &str) -> f64 {
        Scorer::new(&scoring).unwrap().score(answer, completion).unwrap()
    }

    #[test]
    fn exact_takes_the_whole_completion() {
        assert_eq!(score(Scoring::Exact, "46", " 46\n"), 1.0);
        assert_eq!(score(Scoring::Exact, "46", "46."), 0.0);
        assert_eq!(score(Scoring::Exact, "46", "146"), 0.0);
    }

    #[test]
    fn numeric_reads_numbers_as_people_write_them() {
        let gold = "He made 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70000";
        for right in [
            "70000",
            "$70,000",
            "the profit is $70,000.",
            "#### 70,000 dollars, not 5",
            "7e4",
            "70000.00",
            "first 3, then 70,000",
        ] {
            assert_eq!(score(Scoring::Numeric, gold, right), 1.0, "{right}");
        }
        for wrong in ["", "no idea", "70001", "-70000", "#### seventy", "70,000 of 5", "700000"] {
            assert_eq!(score(Scoring::Numeric, gold, wrong), 0.0, "{wrong}");
        }
        assert_eq!(score(Scoring::Numeric, "-3", "so x = -3"), 1.0);
        assert_eq!(score(Scoring::Numeric, "3", "10-7=3, so 10-3"), 1.0);
        assert_eq!(score(Scoring::Numeric, "1/3", "0.3333333333"), 1.0);
        assert_eq!(score(Scoring::Numeric, "0.75", "3/4"), 1.0);
        assert_eq!(score(Scoring::Numeric, "0", "1/0"), 0.0);
        assert_eq!(score(Scoring::Numeric, "12345678901234567890", "12345678901234567891"), 0.0);
    }

    #[test]
    fn regex_compares_the_last_match() {
        let scoring = Scoring::Regex("answer: *([A-D])".into());
        assert_eq!(score(scoring.clone(), "B", "answer: A. No, answer: B"), 1.0);
        assert_eq!(score(scoring.clone(), "A", "answer: A. No, answer: B"), 0.0);
        assert_eq!(score(scoring, "B", "B"), 0.0);
        assert!(Scorer::new(&Scoring::Regex("(".into())).is_err());
    }

    #[test]
    fn an_answer_that_nothing_meets_is_not_admitted() {
        let numeric = Scorer::new(&Scoring::Numeric).unwrap();
        assert!(numeric.admits("#### 4") && !numeric.admits("four"));
    }

    proptest! {
        #[test]
        fn no_text_makes_a_scorer_panic(answer in ".{0,40}", completion in "[-0-9.,/eE#$−( ]{0,60}|.{0,60}") {
            for scoring in [Scoring::Exact, Scoring::Numeric, Scoring::Regex("[0-9]*(é|x)?".into())] {
                let scored = score(scoring, &answer, &completion);
                prop_assert!(scored == 0.0 || scored == 1.0);
            }
        }
    }
}
