//! The curves of a training run: `metrics.jsonl`, one line a step, with TensorBoard events beside it. Not for scores that decide
//! anything: those are measured by the evaluator from a checkpoint.
//!
//! A line is `{"step":10,"time":1767225600.5,"loss":2.31}`; values that JSON has no number for are the strings `NaN`, `Infinity`
//! and `-Infinity`. A resumed run appends `{"resumed_from":S}`, which supersedes every earlier point past step S, so that readers
//! see each (name, step) once and nothing is rewritten.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::failure::{Class, Context, Failure, Result};
use crate::tensorboard::EventWriter;

/// The file's name in a run's directory.
pub const FILE: &str = "metrics.jsonl";
/// The folder of TensorBoard event files in a run's directory.
pub const TENSORBOARD: &str = "tensorboard";

const RESERVED: [&str; 3] = ["step", "time", "resumed_from"];

/// Appends metrics. Once open it never fails its caller: a write that fails is warned of once and counted.
pub struct MetricsWriter {
    path: PathBuf,
    lines: File,
    events: EventWriter,
    lost: u64,
}

impl MetricsWriter {
    /// Starts the metrics of a fresh run in `dir`, in place of any that are there.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where the files cannot be made.
    pub fn create(dir: &Path) -> Result<Self> {
        let tensorboard = dir.join(TENSORBOARD);
        if tensorboard.exists() {
            std::fs::remove_dir_all(&tensorboard)
                .context(Class::Infrastructure, || format!("Cannot clear {}", tensorboard.display()))?;
        }
        let path = dir.join(FILE);
        std::fs::create_dir_all(dir)
            .and_then(|()| File::create(&path))
            .context(Class::Infrastructure, || format!("Cannot create {}", path.display()))?;
        Self::append(dir, None)
    }

    /// Continues the metrics in `dir` from a checkpoint of step `from_step`: what the dead segment logged past it is superseded.
    /// A torn last line is cut off. Without earlier metrics this is [`Self::create`].
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where the files cannot be opened.
    pub fn resume(dir: &Path, from_step: u64) -> Result<Self> {
        let path = dir.join(FILE);
        if !path.exists() {
            return Self::create(dir);
        }
        mend(&path).context(Class::Infrastructure, || format!("Cannot resume {}", path.display()))?;
        let mut writer = Self::append(dir, Some(from_step))?;
        writer.write(&json!({ "resumed_from": from_step }));
        Ok(writer)
    }

    fn append(dir: &Path, resumed_from: Option<u64>) -> Result<Self> {
        let path = dir.join(FILE);
        let cannot = || format!("Cannot open {}", path.display());
        let lines = OpenOptions::new().append(true).open(&path).context(Class::Infrastructure, cannot)?;
        let events = EventWriter::create(&dir.join(TENSORBOARD), resumed_from.map(|step| step + 1))
            .context(Class::Infrastructure, || format!("Cannot create TensorBoard events in {}", dir.display()))?;
        Ok(Self { path, lines, events, lost: 0 })
    }

    /// Logs the values of one step. The names `step`, `time` and `resumed_from` are the file's own and are refused.
    pub fn log(&mut self, step: u64, values: &[(&str, f64)]) {
        let time = crate::clock::now().as_secs_f64();
        let mut line = Map::new();
        line.insert("step".into(), step.into());
        line.insert("time".into(), time.into());
        for &(name, value) in values {
            if RESERVED.contains(&name) {
                self.lose(&format!("`{name}` is not a metric's name"));
            } else {
                line.insert(name.into(), number(value));
            }
        }
        self.write(&Value::Object(line));
        if let Err(error) = self.events.scalars(time, step, values) {
            self.lose(&error.to_string());
        }
    }

    /// Forces what was logged to disk.
    pub fn flush(&mut self) {
        if let Err(error) = self.lines.sync_data() {
            self.lose(&error.to_string());
        }
    }

    /// How many writes were lost: anything above 0 belongs in the run's report.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// One write call a line, so that lines of concurrent appenders do not mix.
    fn write(&mut self, line: &Value) {
        if let Err(error) = self.lines.write_all(format!("{line}\n").as_bytes()) {
            self.lose(&error.to_string());
        }
    }

    fn lose(&mut self, error: &str) {
        if self.lost == 0 {
            tracing::warn!("Metrics are being lost: {}: {error}; training goes on.", self.path.display());
        }
        self.lost += 1;
    }
}

/// Ends the file with a whole line: cuts a torn one, completes one that lacks only its newline.
fn mend(path: &Path) -> std::io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let start = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let tail = &text[start..];
    if tail.is_empty() {
        return Ok(());
    }
    if serde_json::from_slice::<Map<String, Value>>(tail).is_ok() {
        file.seek(SeekFrom::End(0))?;
        return file.write_all(b"\n");
    }
    file.set_len(start as u64)
}

fn number(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None if value.is_nan() => "NaN".into(),
        None if value > 0.0 => "Infinity".into(),
        None => "-Infinity".into(),
    }
}

fn value(json: &Value) -> Option<f64> {
    match json {
        Value::Number(number) => number.as_f64(),
        Value::Null => Some(f64::NAN),
        Value::String(text) => match text.as_str() {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}

/// One point of a curve.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Point {
    /// Training step.
    pub step: u64,
    /// When it was logged, in seconds since the Unix epoch.
    pub time: f64,
    /// The value; not finite where training was not.
    pub value: f64,
}

/// All curves of a run, each with its steps ascending and every step once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    series: BTreeMap<String, Vec<Point>>,
}

impl Metrics {
    /// The names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.series.keys().map(String::as_str)
    }
    /// The points of `name`; empty where nothing was logged under it.
    pub fn series(&self, name: &str) -> &[Point] {
        self.series.get(name).map_or(&[], Vec::as_slice)
    }
    /// The last value of `name`. `None` is absent telemetry, not zero.
    pub fn last(&self, name: &str) -> Option<f64> {
        self.series(name).last().map(|point| point.value)
    }
}

/// Reads the metrics in `dir`, superseded points left out. A torn last line is passed over.
///
/// # Errors
/// [`Class::Infrastructure`] where the file cannot be read; [`Class::Integrity`], with file and line, where another line than the
/// last is damaged.
pub fn read(dir: &Path) -> Result<Metrics> {
    let path = dir.join(FILE);
    let text = std::fs::read(&path).context(Class::Infrastructure, || format!("Cannot read {}", path.display()))?;
    let mut series: BTreeMap<String, BTreeMap<u64, Point>> = BTreeMap::new();
    let mut lines = text.split(|byte| *byte == b'\n').enumerate().peekable();
    while let Some((at, line)) = lines.next() {
        if line.is_empty() {
            continue;
        }
        if take(line, &mut series).is_none() {
            // Only what no newline follows can be torn.
            if lines.peek().is_none() {
                break;
            }
            let message = "The metrics file is damaged: this line is not a record.";
            return Err(Failure::new(Class::Integrity, message)
                .hint("restore the file from a copy, or run the training again")
                .at(format!("{}:{}", path.display(), at + 1)));
        }
    }
    let series = series.into_iter().map(|(name, points)| (name, points.into_values().collect())).collect();
    Ok(Metrics { series })
}

fn take(line: &[u8], series: &mut BTreeMap<String, BTreeMap<u64, Point>>) -> Option<()> {
    let record: Map<String, Value> = serde_json::from_slice(line).ok()?;
    if let Some(from) = record.get("resumed_from") {
        let past = from.as_u64()?.saturating_add(1);
        series.values_mut().for_each(|points| drop(points.split_off(&past)));
        series.retain(|_, points| !points.is_empty());
        return Some(());
    }
    let (step, time) = (record.get("step")?.as_u64()?, record.get("time")?.as_f64()?);
    for (name, json) in record.iter().filter(|(name, _)| !RESERVED.contains(&name.as_str())) {
        series.entry(name.clone()).or_default().insert(step, Point { step, time, value: value(json)? });
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(metrics: &Metrics, name: &str) -> Vec<(u64, f64)> {
        metrics.series(name).iter().map(|point| (point.step, point.value)).collect()
    }

    #[test]
    fn what_is_logged_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::create(dir.path()).unwrap();
        writer.log(1, &[("loss", 2.5), ("train/reward", 0.1 + 0.2)]);
        writer.log(2, &[("loss", f64::NAN), ("train/reward", f64::NEG_INFINITY)]);
        writer.flush();
        let metrics = read(dir.path()).unwrap();
        assert_eq!(metrics.names().collect::<Vec<_>>(), ["loss", "train/reward"]);
        assert_eq!(points(&metrics, "train/reward"), [(1, 0.1 + 0.2), (2, f64::NEG_INFINITY)]);
        assert!(metrics.last("loss").unwrap().is_nan());
        assert_eq!((metrics.last("absent"), writer.lost()), (None, 0));
    }

    #[test]
    fn a_resumed_run_supersedes_what_lies_past_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut dead = MetricsWriter::create(dir.path()).unwrap();
        (1..=5).for_each(|step| {
            dead.log(step, &[("loss", step as f64), ("dead/only", 1.0)][..if step > 3 { 2 } else { 1 }])
        });
        let mut live = MetricsWriter::resume(dir.path(), 3).unwrap();
        live.log(4, &[("loss", 40.0)]);
        let metrics = read(dir.path()).unwrap();
        assert_eq!(points(&metrics, "loss"), [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]);
        assert_eq!(metrics.names().collect::<Vec<_>>(), ["loss"]);
    }

    #[test]
    fn a_torn_last_line_is_passed_over_and_cut_on_resume() {
        let dir = tempfile::tempdir().unwrap();
        MetricsWriter::create(dir.path()).unwrap().log(1, &[("loss", 1.0)]);
        let path = dir.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        for torn in [&b"{\"step\":2,\"ti"[..], b"{", b"{\"step\":2,\"time\":3.0,\"loss\":0.5}"] {
            std::fs::write(&path, [&whole[..], torn].concat()).unwrap();
            let complete = torn.ends_with(b"}");
            assert_eq!(read(dir.path()).unwrap().series("loss").len(), if complete { 2 } else { 1 });
            let mut writer = MetricsWriter::resume(dir.path(), 2).unwrap();
            writer.log(3, &[("loss", 3.0)]);
            let steps: Vec<u64> = read(dir.path()).unwrap().series("loss").iter().map(|point| point.step).collect();
            assert_eq!(steps, if complete { vec![1, 2, 3] } else { vec![1, 3] });
        }
    }

    #[test]
    fn other_damage_names_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::create(dir.path()).unwrap();
        writer.log(1, &[("loss", 1.0)]);
        writer.log(2, &[("loss", 1.0)]);
        let path = dir.path().join(FILE);
        let damaged = std::fs::read_to_string(&path).unwrap().replacen("\"step\":1", "\"step\":x", 1);
        std::fs::write(&path, damaged).unwrap();
        let failure = read(dir.path()).unwrap_err();
        assert_eq!((failure.class, failure.at.unwrap()), (Class::Integrity, format!("{}:1", path.display())));
    }

    #[test]
    fn a_failing_disk_is_counted_and_does_not_stop_training() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::create(dir.path()).unwrap();
        writer.lines = OpenOptions::new().write(true).open("/dev/full").unwrap();
        writer.log(1, &[("loss", 1.0)]);
        writer.log(2, &[("loss", 1.0), ("step", 3.0)]);
        assert_eq!(writer.lost(), 3);
    }
}
