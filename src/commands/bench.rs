//! `hone bench`: the trainer's benchmarks as a table, or a JSON line a measurement.

use crate::{cli, output};
use hone_runs::Result;
use hone_trainer::bench::{self, Measurement};

/// Runs one benchmark, or all; lines come as they are measured.
pub fn run(args: &cli::Bench, json: bool) -> Result<()> {
    let names: Vec<&str> = match &args.name {
        Some(name) => vec![name],
        None => bench::NAMES.to_vec(),
    };
    let mut rows = Vec::new();
    for name in names {
        bench::run(name, super::threads(&args.compute), &mut |measured| {
            if json {
                return output::json_line(&measured);
            }
            output::say(&format!("measured {}, {}", measured.name, measured.shape));
            rows.push(cells(&measured));
            Ok(())
        })?;
    }
    if !json {
        let header = ["what", "on", "tokens/s", "GFLOP/s", "limit", "GB/s", "limit", "reached"];
        output::text(&output::wrapping(&[0, 1], &header, rows));
    }
    Ok(())
}

fn cells(m: &Measurement) -> Vec<String> {
    let number = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.1}"));
    let limit = |of: Option<f64>, limit: f64| number(of.map(|_| limit));
    vec![
        m.name.clone(),
        m.shape.clone(),
        m.tokens_per_s.map_or_else(String::new, |x| format!("{x:.0}")),
        number(m.gflops),
        limit(m.gflops, m.limit_gflops),
        number(m.bytes_per_s.map(|x| x / 1e9)),
        limit(m.bytes_per_s, m.limit_bytes_per_s / 1e9),
        format!("{:.0}%", 100.0 * m.of_limit),
    ]
}
