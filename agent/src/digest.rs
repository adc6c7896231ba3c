//! Bounded digests of what a run wrote: its curves in a few numbers each, its log in a few lines. Text from a log is data:
//! it is cleaned of whatever could drive a terminal, and never parsed for a metric.

use std::collections::{BTreeMap, VecDeque};
use std::io::BufRead;

use hone_runs::metrics::{Metrics, Point};
use serde::{Deserialize, Serialize};

/// A curve in a few numbers. Points that are not finite count in `nonfinite` only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Finite points.
    pub n: usize,
    /// NaN or infinite points.
    pub nonfinite: usize,
    /// Step of the first and the last finite point.
    pub steps: [u64; 2],
    /// First value.
    pub first: f64,
    /// Last value.
    pub last: f64,
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
    /// Mean over the last quarter of the points.
    pub tail_mean: f64,
    /// Rise over the last quarter of the points: slope of the least-squares line times its length, in the metric's unit.
    pub tail_rise: f64,
    /// Standard deviation of the last quarter's points around that line.
    pub tail_noise: f64,
}

impl Series {
    /// The summary of points in the order of their steps.
    pub fn of(points: &[Point]) -> Self {
        let finite: Vec<_> = points.iter().filter(|p| p.value.is_finite()).collect();
        let nonfinite = points.len() - finite.len();
        let (Some(first), Some(last)) = (finite.first(), finite.last()) else {
            return Self { nonfinite, ..Self::default() };
        };
        let tail = &finite[finite.len() - finite.len().div_ceil(4).max(4).min(finite.len())..];
        let n = tail.len() as f64;
        let (x_mean, y_mean) =
            (tail.iter().map(|p| p.step as f64).sum::<f64>() / n, tail.iter().map(|p| p.value).sum::<f64>() / n);
        let sxx: f64 = tail.iter().map(|p| (p.step as f64 - x_mean).powi(2)).sum();
        let sxy: f64 = tail.iter().map(|p| (p.step as f64 - x_mean) * (p.value - y_mean)).sum();
        let slope = if sxx > 0.0 { sxy / sxx } else { 0.0 };
        let residual = |p: &&Point| (p.value - y_mean - slope * (p.step as f64 - x_mean)).powi(2);
        let squares: f64 = tail.iter().map(residual).sum();
        Self {
            n: finite.len(),
            nonfinite,
            steps: [first.step, last.step],
            first: first.value,
            last: last.value,
            min: finite.iter().map(|p| p.value).fold(f64::INFINITY, f64::min),
            max: finite.iter().map(|p| p.value).fold(f64::NEG_INFINITY, f64::max),
            tail_mean: y_mean,
            tail_rise: slope * (tail[tail.len() - 1].step - tail[0].step) as f64,
            tail_noise: if tail.len() > 2 { (squares / (n - 2.0)).sqrt() } else { 0.0 },
        }
    }
}

/// The metric that tells which stage of the recipe a step belongs to.
const STAGE: &str = "train/stage";

/// A run's curves, each split by the stage its steps belong to: `stages.1/rl/reward`. Without `train/stage` names stay as they are.
pub fn curves(metrics: &Metrics) -> BTreeMap<String, Series> {
    let stage_of: BTreeMap<u64, u64> = metrics.series(STAGE).iter().map(|p| (p.step, p.value as u64)).collect();
    let mut split: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for name in metrics.names().filter(|name| *name != STAGE) {
        for point in metrics.series(name) {
            let key = match stage_of.get(&point.step) {
                Some(stage) => format!("stages.{stage}/{name}"),
                None => name.to_string(),
            };
            split.entry(key).or_default().push(*point);
        }
    }
    split.into_iter().map(|(name, points)| (name, Series::of(&points))).collect()
}

/// What a marker line says went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Marker {
    /// A value is NaN or infinite, or training diverged.
    Diverged,
    /// Memory ran out.
    OutOfMemory,
    /// A limit of time was hit.
    TimedOut,
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Its number, from 1.
    pub number: usize,
    /// Its text, cleaned and cut to [`LINE`] characters.
    pub text: String,
}

/// A log of any size in a few lines.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LogDigest {
    /// Lines in all.
    pub lines: usize,
    /// The first line that reports an error.
    pub first_error: Option<Line>,
    /// The first line of each kind of marker.
    pub markers: BTreeMap<Marker, Line>,
    /// The last lines.
    pub last: Vec<Line>,
}

/// Most characters of a line.
pub const LINE: usize = 240;
/// Most last lines.
pub const LAST: usize = 20;
/// Most bytes of a line that are looked at; what follows on the same line is passed over.
const READ: u64 = 16 * 1024;

impl LogDigest {
    /// Reads a log to its end in bounded memory. A log that cannot be read further ends there.
    pub fn read(mut log: impl BufRead) -> Self {
        let mut digest = Self::default();
        let mut last: VecDeque<Line> = VecDeque::new();
        let mut buffer = Vec::new();
        loop {
            buffer.clear();
            match std::io::Read::take(&mut log, READ).read_until(b'\n', &mut buffer) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
            if buffer.last() != Some(&b'\n') && buffer.len() as u64 == READ && log.skip_until(b'\n').is_err() {
                break;
            }
            digest.lines += 1;
            let text = clean(&String::from_utf8_lossy(&buffer));
            let line = Line { number: digest.lines, text: cut(&text, LINE) };
            let words: Vec<String> = words(&text);
            if digest.first_error.is_none() && words.iter().any(|w| is_error(w)) {
                digest.first_error = Some(line.clone());
            }
            if let Some(marker) = marker(&words) {
                digest.markers.entry(marker).or_insert_with(|| line.clone());
            }
            if !text.trim().is_empty() {
                last.push_back(line);
                if last.len() > LAST {
                    last.pop_front();
                }
            }
        }
        digest.last = last.into();
        digest
    }

    /// As text for people and prompts: at most about 40 lines of [`LINE`] characters.
    pub fn text(&self) -> String {
        let mut out = format!("{} lines\n", self.lines);
        let mut put = |what: &str, line: &Line| out.push_str(&format!("{what}, line {}: {}\n", line.number, line.text));
        if let Some(line) = &self.first_error {
            put("first error", line);
        }
        for (marker, line) in &self.markers {
            let what = match marker {
                Marker::Diverged => "not finite or diverged",
                Marker::OutOfMemory => "out of memory",
                Marker::TimedOut => "timed out",
            };
            put(what, line);
        }
        for line in &self.last {
            out.push_str(&format!("{:>6}  {}\n", line.number, line.text));
        }
        out
    }
}

/// Removes terminal escapes and control characters, tabs aside; every kind of line break becomes a space.
pub fn clean(text: &str) -> String {
    let mut out = strip(text, ' ');
    out.truncate(out.trim_end().len());
    out
}

/// Text as it may be printed: without terminal escapes and control characters, newlines and tabs aside.
pub fn printable(text: &str) -> String {
    strip(&text.replace("\r\n", "\n"), '\n')
}

fn strip(text: &str, line_break: char) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            // CSI: parameters up to a final byte in @..~. OSC and its kin: up to BEL or ST. Others: one character.
            '\u{1b}' | '\u{9b}' => {
                let kind = if c == '\u{9b}' { Some('[') } else { chars.next() };
                match kind {
                    Some('[') => drop(chars.by_ref().find(|c| ('@'..='~').contains(c))),
                    Some(']' | 'P' | 'X' | '^' | '_') => {
                        while let Some(c) = chars.next() {
                            if c == '\u{7}' || c == '\u{9c}' || (c == '\u{1b}' && chars.next_if_eq(&'\\').is_some()) {
                                break;
                            }
                        }
                    }
                    _ => {}
                }
            }
            '\t' => out.push(c),
            '\n' => out.push(line_break),
            '\u{b}' | '\u{c}' | '\r' | '\u{85}' | '\u{2028}' | '\u{2029}' => out.push(' '),
            // Directional overrides and zero-width characters make text look like what it is not.
            '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' => {}
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

/// The first `limit` characters, with the number of those left out.
pub fn cut(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((at, _)) => format!("{}… ({} more characters)", &text[..at], text[at..].chars().count()),
        None => text.into(),
    }
}

fn words(text: &str) -> Vec<String> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    text.split(|c| !word(c)).filter(|w| !w.is_empty()).map(str::to_lowercase).collect()
}

/// `error` and `ValueError` are, `error_rate` is not.
fn is_error(word: &str) -> bool {
    let own = [
        "fatal",
        "panicked",
        "traceback",
        "exception",
        "aborted",
        "killed",
        "failed",
        "segfault",
        "diverged",
        "errors",
    ];
    own.contains(&word) || (word.ends_with("error") && !word.contains('_'))
}

fn marker(words: &[String]) -> Option<Marker> {
    let has = |w: &str| words.iter().any(|x| x == w);
    let phrase = |p: &[&str]| words.windows(p.len()).any(|w| w.iter().zip(p).all(|(a, b)| a == b));
    if has("nan") || has("inf") || has("infinity") || has("diverged") || phrase(&["not", "finite"]) {
        Some(Marker::Diverged)
    } else if has("oom")
        || has("outofmemoryerror")
        || phrase(&["out", "of", "memory"])
        || phrase(&["allocate", "memory"])
    {
        Some(Marker::OutOfMemory)
    } else if has("timeout") || phrase(&["timed", "out"]) {
        Some(Marker::TimedOut)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hone_runs::metrics::{MetricsWriter, read};

    fn points(values: &[f64]) -> Vec<Point> {
        values.iter().enumerate().map(|(i, &value)| Point { step: i as u64 + 1, time: 0.0, value }).collect()
    }

    #[test]
    fn a_series_says_how_it_ends() {
        let falling: Vec<f64> = (0..40).map(|i| 4.0 - 0.1 * i as f64).collect();
        let series = Series::of(&points(&falling));
        assert_eq!((series.n, series.steps, series.first), (40, [1, 40], 4.0));
        assert!((series.tail_rise + 0.9).abs() < 1e-9 && series.tail_noise < 1e-9, "{series:?}");
        let broken = Series::of(&points(&[1.0, f64::NAN, 3.0, f64::INFINITY]));
        assert_eq!((broken.n, broken.nonfinite, broken.min, broken.max), (2, 2, 1.0, 3.0));
        assert_eq!(Series::of(&points(&[f64::NAN])).n, 0);
        assert_eq!(Series::of(&[]), Series::default());
    }

    #[test]
    fn curves_are_split_by_stage() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::create(dir.path()).unwrap();
        (1..=4).for_each(|s| writer.log(s, &[("train/stage", 0.0), ("train/loss", 2.0)]));
        (5..=9).for_each(|s| writer.log(s, &[("train/stage", 1.0), ("train/loss", -0.1), ("rl/reward", 0.5)]));
        let curves = curves(&read(dir.path()).unwrap());
        let names: Vec<_> = curves.keys().map(String::as_str).collect();
        assert_eq!(names, ["stages.0/train/loss", "stages.1/rl/reward", "stages.1/train/loss"]);
        assert_eq!((curves["stages.0/train/loss"].n, curves["stages.1/train/loss"].last), (4, -0.1));
    }

    #[test]
    fn a_long_log_keeps_what_matters() {
        let mut log = String::new();
        for i in 0..50_000 {
            log += &match i {
                700 => "ValueError: shapes do not match\n".into(),
                900 => "error: a later one\n".to_string(),
                30_000 => "step 30000 loss NaN\n".into(),
                40_000 => "CUDA out of memory\n".into(),
                i => format!("step {i} error_rate 0.1 information\n"),
            };
        }
        let digest = LogDigest::read(log.as_bytes());
        assert_eq!((digest.lines, digest.first_error.as_ref().unwrap().number), (50_000, 701));
        assert_eq!(digest.markers[&Marker::Diverged].number, 30_001);
        assert_eq!(digest.markers[&Marker::OutOfMemory].number, 40_001);
        assert_eq!((digest.last.len(), digest.last[LAST - 1].number), (LAST, 50_000));
        let text = digest.text();
        assert!(text.contains("first error, line 701: ValueError") && text.len() < 40 * (LINE + 40), "{text}");
    }

    #[test]
    fn one_endless_line_is_bounded() {
        let digest = LogDigest::read([vec![b'x'; 3_000_000], b"\nerror: end\n".to_vec()].concat().as_slice());
        assert_eq!((digest.lines, digest.first_error.unwrap().number), (2, 2));
        assert!(digest.last[0].text.chars().count() < LINE + 40);
    }

    #[test]
    fn nothing_that_drives_a_terminal_survives() {
        let hostile = "\u{1b}[2J\u{1b}[31mred\u{1b}[0m\u{1b}]0;title\u{7}\u{1b}]8;;http://x\u{1b}\\link\u{9b}1mA\rB\u{2028}C\u{202e}D\u{8}E\u{0}";
        assert_eq!(clean(hostile), "redlinkA B CDE");
        assert_eq!(clean("\u{1b}[unfinished"), "nfinished");
        assert_eq!(clean("\u{1b}]never closed"), "");
    }
}
