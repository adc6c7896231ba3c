//! What a campaign has learned: a sentence a round, and how well its forecasts came true. A fold of the history; nothing
//! is stored here.

use serde::{Deserialize, Serialize};

use crate::edit::{Change, show};
use crate::judge::Verdict;
use crate::proposal::{Decision, Past};

/// What one round taught.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lesson {
    /// The round.
    pub round: u32,
    /// One line: what was changed, predicted, measured and decided.
    pub text: String,
    /// Measured minus predicted effect, in the metric's unit; None where nothing was measured.
    pub error: Option<f64>,
}

/// How forecasts compare with measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Rounds with both.
    pub n: usize,
    /// Mean of measured minus predicted.
    pub bias: f64,
    /// Mean of its absolute value.
    pub error: f64,
    /// Share of rounds whose effect had the predicted sign.
    pub right_sign: f64,
}

/// The lesson of a round.
pub fn lesson(past: &Past) -> Lesson {
    let what = match (&past.proposal, past.changes.is_empty()) {
        (_, false) => past.changes.iter().map(change).collect::<Vec<_>>().join(", "),
        (Some(proposal), true) => proposal.title.clone(),
        (None, true) => "no usable proposal".into(),
    };
    let mut text = what;
    let predicted = past.proposal.as_ref().map(|p| p.predicted_effect);
    if let Some(predicted) = predicted {
        text += &format!("; predicted {predicted:+.3}");
    }
    match (past.effect, past.interval) {
        (Some(effect), Some([low, high])) => text += &format!(", measured {effect:+.3} [{low:+.3}, {high:+.3}]"),
        (Some(effect), None) => text += &format!(", measured {effect:+.3}"),
        (None, _) => {}
    }
    match past.verdict {
        Some(Verdict::Better) => text += ": better",
        Some(Verdict::Worse) => text += ": worse",
        Some(Verdict::Undecided) => text += ": undecided",
        Some(Verdict::Invalid) => text += ": invalid (diverged or not a number)",
        Some(Verdict::Incomplete) => text += ": incomplete (a limit was hit; says nothing about the idea)",
        None => {}
    }
    match past.decision {
        Some(Decision::Keep) => text += ", kept",
        Some(Decision::Rollback) => text += ", rolled back",
        Some(Decision::Iterate) => text += ", to be iterated",
        None => {}
    }
    if let Some(refusal) = &past.refusal {
        text += &format!("; refused: {refusal}");
    }
    Lesson {
        round: past.round,
        text,
        error: past.effect.zip(predicted).map(|(measured, predicted)| measured - predicted),
    }
}

fn change(change: &Change) -> String {
    let value = |v: &Option<serde_json::Value>| v.as_ref().map_or("none".into(), show);
    match &change.key {
        Some(key) => format!("{key} {} → {}", value(&change.from), value(&change.to)),
        None => change.file.clone(),
    }
}

/// How well the forecasts of these rounds came true; None without any.
pub fn calibration<'a>(history: impl IntoIterator<Item = &'a Past>) -> Option<Calibration> {
    let pairs: Vec<(f64, f64)> =
        history.into_iter().filter_map(|past| Some((past.proposal.as_ref()?.predicted_effect, past.effect?))).collect();
    let n = pairs.len();
    let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / n as f64;
    (n > 0).then(|| Calibration {
        n,
        bias: mean(|(predicted, measured)| measured - predicted),
        error: mean(|(predicted, measured)| (measured - predicted).abs()),
        right_sign: mean(|(predicted, measured)| f64::from(u8::from(predicted * measured > 0.0))),
    })
}

/// A forecast that learns: `prior` counts as two rounds among the measured effects of the rounds whose source begins with `source`.
pub fn forecast(history: &[Past], source: &str, prior: f64) -> f64 {
    let measured: Vec<f64> = history
        .iter()
        .filter(|past| past.proposal.as_ref().is_some_and(|p| p.source.starts_with(source)))
        .filter_map(|past| past.effect)
        .collect();
    (2.0 * prior + measured.iter().sum::<f64>()) / (2.0 + measured.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proposal::Proposal;
    use serde_json::json;

    fn past(round: u32, predicted: f64, effect: Option<f64>) -> Past {
        let proposal = Proposal {
            title: "faster".into(),
            hypothesis: String::new(),
            edits: vec![],
            predicted_effect: predicted,
            differs: None,
            source: "search/rule/still-improving".into(),
        };
        let change =
            Change { file: "r.yaml".into(), key: Some("lr".into()), from: Some(json!(1e-3)), to: Some(json!(3e-3)) };
        Past {
            round,
            proposal: Some(proposal),
            changes: vec![change],
            verdict: effect.map(|_| Verdict::Better),
            effect,
            interval: effect.map(|e| [e - 0.01, e + 0.01]),
            refusal: None,
            decision: effect.map(|_| Decision::Keep),
            flags: vec![],
        }
    }

    #[test]
    fn a_lesson_is_one_line_with_the_numbers() {
        let lesson = lesson(&past(3, 0.05, Some(0.12)));
        let expected = "lr 0.001 → 0.003; predicted +0.050, measured +0.120 [+0.110, +0.130]: better, kept";
        assert_eq!(lesson.text, expected);
        assert!((lesson.error.unwrap() - 0.07).abs() < 1e-12);
    }

    #[test]
    fn a_round_without_a_proposal_teaches_why() {
        let failed = Past { proposal: None, changes: vec![], refusal: Some("prose only".into()), ..past(1, 0.0, None) };
        assert_eq!(lesson(&failed).text, "no usable proposal; refused: prose only");
        assert_eq!(lesson(&failed).error, None);
    }

    #[test]
    fn forecasts_are_held_to_account() {
        let history = [past(1, 0.1, Some(0.2)), past(2, 0.1, Some(-0.1)), past(3, 0.1, None)];
        let calibration = calibration(&history).unwrap();
        assert_eq!((calibration.n, calibration.right_sign), (2, 0.5));
        assert!((calibration.bias + 0.05).abs() < 1e-12 && (calibration.error - 0.15).abs() < 1e-12);
        assert_eq!(super::calibration(&history[2..]), None);
        assert!((forecast(&history, "search/rule/", 0.06) - 0.22 / 4.0).abs() < 1e-12);
        assert_eq!(forecast(&history, "llm/", 0.06), 0.06);
    }
}
