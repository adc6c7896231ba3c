//! `hone runs`: the run folders of a workspace, looked at.

use crate::{cli::Runs, output};
use hone_runs::{Class, Failure, Result, failure::Context, folder, metrics};
use plotters::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Runs one of the family.
pub fn run(command: &Runs, json: bool) -> Result<()> {
    match command {
        Runs::List { workspace } => list(workspace, json),
        Runs::Show { id, workspace } => show(&find(id, workspace)?, json),
        Runs::Metrics { id, plot, name, workspace } => {
            let folder = find(id, workspace)?;
            match plot {
                Some(file) => plot_to(&[folder], name, file, json),
                None => values(&folder, name, json),
            }
        }
        Runs::Compare { a, b, plot, name, workspace } => {
            let folders = [find(a, workspace)?, find(b, workspace)?];
            match plot {
                Some(file) => plot_to(&folders, name, file, json),
                None => compare(&folders, name, json),
            }
        }
    }
}

/// Every folder below `runs/` that holds a trainer's manifest, by path.
fn all(workspace: &Path) -> Vec<PathBuf> {
    fn below(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
        if folder.join("manifest.json").exists() {
            found.push(folder.to_owned());
        } else if depth > 0 {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.filter(|e| e.path().is_dir()).for_each(|e| below(&e.path(), depth - 1, found));
        }
    }
    let mut found = Vec::new();
    below(&workspace.join("runs"), 5, &mut found);
    found.sort();
    found
}

/// A run by its folder, or by its id: the folder's path below `runs/`.
fn find(id: &str, workspace: &Path) -> Result<PathBuf> {
    let named = [PathBuf::from(id), workspace.join("runs").join(id)];
    named.into_iter().find(|f| f.join("manifest.json").exists()).ok_or_else(|| {
        Failure::new(Class::Usage, format!("There is no run `{id}`."))
            .hint("`hone runs list` shows the ids; a run's folder is accepted too")
    })
}

fn id_of(folder: &Path, workspace: &Path) -> String {
    folder.strip_prefix(workspace.join("runs")).unwrap_or(folder).display().to_string()
}

fn file(folder: &Path, name: &str) -> Result<Option<Value>> {
    folder::read_json(&folder.join(name))
}

fn list(workspace: &Path, json: bool) -> Result<()> {
    let mut rows = Vec::new();
    for run in all(workspace) {
        let result = file(&run, "result.json")?;
        let manifest = file(&run, "manifest.json")?.unwrap_or_default();
        let state = if result.is_some() { "finished" } else { "unfinished" };
        rows.push(json!({"id": id_of(&run, workspace), "seed": manifest["seed"], "state": state, "result": result}));
    }
    output::either(json, &rows, || {
        let cells = rows.iter().map(|r| {
            let of = |key: &str| r["result"].get(key).map_or_else(String::new, Value::to_string);
            let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
            vec![text(&r["id"]), text(&r["seed"]), text(&r["state"]), of("steps"), of("tokens")]
        });
        output::table(&["run", "seed", "state", "steps", "tokens"], cells)
    })
}

fn show(folder: &Path, json: bool) -> Result<()> {
    let metrics = metrics::read(folder)?;
    let last: serde_json::Map<String, Value> =
        metrics.names().map(|n| (n.to_owned(), json!(metrics.last(n)))).collect();
    let errors = folder::tail(&folder.join("stderr.log"), 4096);
    let all = json!({
        "folder": folder,
        "manifest": file(folder, "manifest.json")?,
        "result": file(folder, "result.json")?,
        "last": last,
        "stderr": errors,
    });
    output::either(json, &all, || serde_json::to_string_pretty(&all).unwrap_or_default())
}

fn wanted(metric: &str, names: &[String]) -> bool {
    names.is_empty() || names.iter().any(|n| metric.contains(n.as_str()))
}

fn no_such_metric() -> Failure {
    Failure::new(Class::Usage, "No metric has such a name.").hint("`hone runs metrics ID` lists them")
}

fn values(folder: &Path, names: &[String], json: bool) -> Result<()> {
    let metrics = metrics::read(folder)?;
    let chosen: Vec<&str> = metrics.names().filter(|n| wanted(n, names)).collect();
    if chosen.is_empty() && !names.is_empty() {
        return Err(no_such_metric());
    }
    if json {
        let series: serde_json::Map<String, Value> = chosen
            .iter()
            .map(|n| ((*n).to_owned(), metrics.series(n).iter().map(|p| json!([p.step, p.value])).collect()))
            .collect();
        return output::json(&series);
    }
    let rows = chosen.iter().map(|name| {
        let series = metrics.series(name);
        let at = |p: Option<&metrics::Point>| p.map_or_else(String::new, |p| format!("{:.4}", p.value));
        let lowest = series.iter().min_by(|a, b| a.value.total_cmp(&b.value));
        let highest = series.iter().max_by(|a, b| a.value.total_cmp(&b.value));
        vec![
            (*name).to_owned(),
            series.len().to_string(),
            at(series.first()),
            at(lowest),
            at(highest),
            at(series.last()),
        ]
    });
    output::text(&output::table(&["metric", "points", "first", "lowest", "highest", "last"], rows));
    Ok(())
}

fn compare(folders: &[PathBuf; 2], names: &[String], json: bool) -> Result<()> {
    let [a, b] = folders;
    let (in_a, in_b) = (metrics::read(a)?, metrics::read(b)?);
    let all: BTreeSet<&str> = in_a.names().chain(in_b.names()).filter(|n| wanted(n, names)).collect();
    let recipe =
        |f: &Path| Ok::<_, Failure>(file(f, "manifest.json")?.map(|m| m["recipe"].clone()).unwrap_or_default());
    let (mut left, mut right) = (Vec::new(), Vec::new());
    leaves("", &recipe(a)?, &mut left);
    leaves("", &recipe(b)?, &mut right);
    let keys: BTreeSet<&String> = left.iter().chain(&right).map(|(k, _)| k).collect();
    let value = |of: &[(String, Value)], key: &String| of.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    let recipe: Vec<Value> = keys
        .into_iter()
        .filter(|k| value(&left, k) != value(&right, k))
        .map(|k| json!({"key": k, "a": value(&left, k), "b": value(&right, k)}))
        .collect();
    let last: Vec<Value> = all.iter().map(|n| json!({"metric": n, "a": in_a.last(n), "b": in_b.last(n)})).collect();
    let both = json!({"a": a, "b": b, "recipe": recipe, "last": last});
    output::either(json, &both, || {
        let cell = |v: &Value| match v.as_f64() {
            Some(x) if !v.is_u64() => format!("{x:.5}"),
            _ => v.to_string(),
        };
        let rows = |of: &[Value], key: &str| {
            of.iter()
                .map(|r| vec![r[key].as_str().unwrap_or_default().to_owned(), cell(&r["a"]), cell(&r["b"])])
                .collect::<Vec<_>>()
        };
        format!(
            "{}\n\n{}",
            output::table(&["recipe key", "a", "b"], rows(&recipe, "key")),
            output::table(&["last value", "a", "b"], rows(&last, "metric"))
        )
    })
}

/// Every value of a tree, by its dotted key.
fn leaves(prefix: &str, value: &Value, out: &mut Vec<(String, Value)>) {
    let key = |k: &str| if prefix.is_empty() { k.to_owned() } else { format!("{prefix}.{k}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| leaves(&key(k), v, out)),
        Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| leaves(&key(&i.to_string()), v, out)),
        leaf => out.push((prefix.to_owned(), leaf.clone())),
    }
}

/// The mean, the lowest and the highest of each of at most `CURVE_POINTS` equal parts of a curve: what a picture has room for.
struct Curve {
    mean: Vec<(f64, f64)>,
    low: Vec<(f64, f64)>,
    high: Vec<(f64, f64)>,
}

const CURVE_POINTS: usize = 120;

/// Told apart by eyes that do not tell red from green: blue, orange, bluish green, purple.
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(230, 120, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

impl Curve {
    fn of(points: &[metrics::Point]) -> Self {
        let finite: Vec<(f64, f64)> =
            points.iter().filter(|p| p.value.is_finite()).map(|p| (p.step as f64, p.value)).collect();
        let mut curve = Self { mean: Vec::new(), low: Vec::new(), high: Vec::new() };
        for part in finite.chunks(finite.len().div_ceil(CURVE_POINTS).max(1)) {
            let n = part.len() as f64;
            let step = part.iter().map(|p| p.0).sum::<f64>() / n;
            curve.mean.push((step, part.iter().map(|p| p.1).sum::<f64>() / n));
            curve.low.push((step, part.iter().map(|p| p.1).fold(f64::MAX, f64::min)));
            curve.high.push((step, part.iter().map(|p| p.1).fold(f64::MIN, f64::max)));
        }
        curve
    }
}

/// Draws the chosen metrics of the runs into an SVG file: a panel a metric, a colour a run, the range within each part of a long curve
/// shaded.
fn draw(folders: &[PathBuf], names: &[String], to: &Path) -> Result<()> {
    const PANEL: (u32, u32) = (460, 300);
    const COLUMNS: usize = 2;
    let all = folders.iter().map(|f| metrics::read(f)).collect::<Result<Vec<_>>>()?;
    let chosen: BTreeSet<&str> = all.iter().flat_map(|m| m.names()).filter(|n| wanted(n, names)).collect();
    if chosen.is_empty() {
        return Err(no_such_metric());
    }
    let failed =
        |e: &dyn std::fmt::Display| Failure::new(Class::Infrastructure, format!("Cannot draw {}: {e}.", to.display()));
    let rows = chosen.len().div_ceil(COLUMNS);
    let columns = COLUMNS.min(chosen.len());
    let root = SVGBackend::new(to, (PANEL.0 * columns as u32, PANEL.1 * rows as u32)).into_drawing_area();
    root.fill(&WHITE).map_err(|e| failed(&e))?;
    for (panel, name) in root.split_evenly((rows, columns)).iter().zip(&chosen) {
        let series: Vec<Curve> = all.iter().map(|m| Curve::of(m.series(name))).collect();
        let points = || series.iter().flat_map(|curve| curve.low.iter().chain(&curve.high));
        let (low, high) = points().fold((f64::MAX, f64::MIN), |(l, h), p| (l.min(p.1), h.max(p.1)));
        if low > high {
            continue;
        }
        let room = ((high - low) * 0.05).max(1e-9);
        let last = points().map(|p| p.0).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(panel)
            .caption(name, ("sans-serif", 15))
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..last, (low - room)..(high + room))
            .map_err(|e| failed(&e))?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc("step")
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.3}"))
            .draw()
            .map_err(|e| failed(&e))?;
        // The key lies where the curves began, out of the way of where they end.
        let ends = series.iter().filter_map(|curve| Some((curve.mean.first()?.1, curve.mean.last()?.1)));
        let rises = ends.map(|(first, last)| last - first).sum::<f64>() > 0.0;
        let corner = if rises { SeriesLabelPosition::UpperLeft } else { SeriesLabelPosition::UpperRight };
        for (i, (run, folder)) in series.into_iter().zip(folders).enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let label = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let range: Vec<_> = run.low.into_iter().chain(run.high.into_iter().rev()).collect();
            chart.draw_series([Polygon::new(range, colour.mix(0.15).filled())]).map_err(|e| failed(&e))?;
            chart
                .draw_series(LineSeries::new(run.mean, colour.stroke_width(2)))
                .map_err(|e| failed(&e))?
                .label(label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
        }
        if folders.len() > 1 {
            chart
                .configure_series_labels()
                .position(corner)
                .border_style(BLACK.mix(0.2))
                .background_style(WHITE.mix(0.8))
                .draw()
                .map_err(|e| failed(&e))?;
        }
    }
    root.present().context(Class::Infrastructure, || format!("Cannot write {}", to.display()))
}

/// Draws, and says where to: on stdout where it is read by programs.
fn plot_to(folders: &[PathBuf], names: &[String], to: &Path, json: bool) -> Result<()> {
    draw(folders, names, to)?;
    if json {
        return output::json(&json!({"wrote": to.display().to_string()}));
    }
    output::say(&format!("wrote {}", to.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_a_metric_are_refused_in_words_as_in_pictures() {
        let run = tempfile::tempdir().unwrap();
        let mut writer = metrics::MetricsWriter::create(run.path()).unwrap();
        writer.log(1, &[("train/loss", 2.0)]);
        writer.log(2, &[("train/loss", 1.0)]);
        writer.flush();
        let (folders, svg) = ([run.path().to_owned()], run.path().join("loss.svg"));
        let nosuch = ["nosuch".to_owned()];
        let said = values(run.path(), &nosuch, false).unwrap_err();
        assert_eq!(said.class, Class::Usage);
        assert_eq!(values(run.path(), &nosuch, true).unwrap_err(), said);
        assert_eq!(plot_to(&folders, &nosuch, &svg, true).unwrap_err(), said);
        plot_to(&folders, &["loss".to_owned()], &svg, true).unwrap();
        assert!(std::fs::read_to_string(&svg).unwrap().contains("<svg"));
    }
}
