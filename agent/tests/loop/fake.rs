//! A trainer and evaluator in milliseconds, behind the launcher's trait: the score is a function of recipe, seed and items. Idempotent by
//! folder, as the real launcher is; it counts how often each run was really started.

use hone_evals::evaluate::{Metric, Report, Score};
use hone_evals::fingerprint::Fingerprint;
use hone_evals::suite::{Split, Subset};
use hone_runs::launcher::{Launcher, Limit, Outcome, Pending, RunSpec, Status};
use hone_runs::{Class, Failure, Result, RunFolder, draws, folder};
use rand::RngExt;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

#[derive(Default)]
pub struct Fake {
    /// How often each folder's process was started.
    pub starts: Mutex<BTreeMap<PathBuf, u32>>,
    /// Argument lists, for tests that look at them.
    pub seen: Mutex<Vec<RunSpec>>,
    /// The first so many starts of runs whose recipe says `mode: flaky` fail for reasons not their own.
    pub flaky: Mutex<u32>,
}

impl Fake {
    pub fn most_starts(&self) -> u32 {
        self.starts.lock().unwrap().values().copied().max().unwrap_or(0)
    }
    pub fn trained(&self) -> usize {
        self.starts.lock().unwrap().keys().filter(|p| !p.to_string_lossy().contains("/eval/")).count()
    }
}

impl Launcher for Fake {
    fn launch(&self, spec: RunSpec) -> Pending<'_, Outcome> {
        Box::pin(async move {
            // The only place where a caller can be lost: a real run goes on without its launcher.
            tokio::task::yield_now().await;
            let run = RunFolder::open(&spec.folder)?;
            if let Some(outcome) = folder::read_json(&run.outcome())? {
                return Ok(outcome);
            }
            *self.starts.lock().unwrap().entry(spec.folder.clone()).or_default() += 1;
            self.seen.lock().unwrap().push(spec.clone());
            let status = match spec.argv[1].as_str() {
                "train" => self.train(&spec)?,
                "eval" => eval(&spec)?,
                other => panic!("{other}"),
            };
            let failure = (status != Status::Finished).then(|| Failure::new(Class::Other, "It said: x."));
            let outcome = Outcome { status, wall_s: 0.5, cpu_s: 0.5, peak_rss: 1, attempt: 1, failure };
            folder::write_json(&run.outcome(), &outcome)?;
            Ok(outcome)
        })
    }

    fn stop<'a>(&'a self, _: &'a Path) -> Pending<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

impl Fake {
    fn train(&self, spec: &RunSpec) -> Result<Status> {
        let recipe: Value =
            serde_saphyr::from_str(&std::fs::read_to_string(spec.cwd.join(&spec.argv[2])).unwrap()).unwrap();
        let seed: u64 = after(spec, "--seed").unwrap().parse().unwrap();
        assert_eq!(after(spec, "--out"), Some(spec.folder.to_str().unwrap()));
        std::fs::write(spec.folder.join("stderr.log"), "step 1\nloss is NaN\n").unwrap();
        let mode = recipe["mode"].as_str().unwrap_or_default();
        match mode {
            "diverge" => return Ok(Status::Failed(5)),
            "slow" => return Ok(Status::Limit(Limit::Wall)),
            "large" => return Ok(Status::Limit(Limit::Memory)),
            "crash" => return Ok(Status::Signal(11)),
            "silent" => return Ok(Status::Finished),
            "tamper" => std::fs::write(spec.cwd.join("evals/add.yaml"), "tasks: []\n").unwrap(),
            "flaky" => {
                let mut left = self.flaky.lock().unwrap();
                if *left > 0 {
                    *left -= 1;
                    return Ok(Status::Failed(6));
                }
            }
            _ => {}
        }
        let lr = recipe["lr"].as_f64().unwrap();
        // Best at 0.4; a run's own luck is far smaller than the gain.
        let depth = recipe["depth"].as_f64().unwrap_or(0.0);
        let skill = 0.7 - (lr - 0.4).abs() + 0.1 * depth + 0.01 * draws(seed, "luck", 0, 0).random::<f64>();
        let hash = format!("{:x}", (skill * 1e12) as u64);
        let model = json!({ "skill": skill, "hash": hash, "mode": mode });
        folder::write_json(&spec.folder.join("checkpoints/step-1/model.json"), &model)?;
        let result = json!({
            "checkpoint": "checkpoints/step-1", "hash": hash, "steps": 1, "tokens": 1000,
            "flops": if mode == "hungry" { 2e6 } else { 1e6 }, "seconds": 0.5, "stop": "budget"
        });
        folder::write_json(&spec.folder.join("result.json"), &result)?;
        Ok(Status::Finished)
    }
}

fn eval(spec: &RunSpec) -> Result<Status> {
    let checkpoint = Path::new(after(spec, "--model").unwrap()).join("model.json");
    let model: Value = folder::read_json(&checkpoint)?.unwrap();
    let seed: u64 = after(spec, "--seed").unwrap().parse().unwrap();
    let fold = after(spec, "--fold").map(|fold| {
        let (i, of) = fold.split_once('/').unwrap();
        (i.parse::<usize>().unwrap() - 1, of.parse().unwrap())
    });
    let split = if after(spec, "--split") == Some("dev") { Split::Dev } else { Split::HeldOut };
    let value = model["skill"].as_f64().unwrap();
    if model["mode"] == "meddle" {
        std::fs::write(spec.cwd.join("evals/add.yaml"), "tasks: []\n").unwrap();
    }
    let score = |value: f64| {
        Metric::Score(Score { value, low: value - 0.1, high: value + 0.1, standard_error: 0.05, n: 100, k: 1 })
    };
    let metric =
        if model["mode"] == "nan" { Metric::Invalid { invalid: "a score is NaN.".into() } } else { score(value) };
    // What is won on the judged metric is lost on the other where the learning rate is high.
    let general = score(0.5 - (value - 0.5).max(0.0) * 0.2);
    let hash = if model["mode"] == "forged" { json!("0") } else { model["hash"].clone() };
    let fingerprint = Fingerprint {
        harness: if model["mode"] == "newer" { "fake 2" } else { "fake" }.into(),
        suite: spec.argv[2].clone(),
        tasks: BTreeMap::new(),
        subset: Subset { split, fold },
        seed,
        model: Map::from_iter([
            ("checkpoint".to_string(), hash),
            ("segmentation".to_string(), json!(model["mode"] == "segmented")),
        ]),
    };
    let report = Report {
        suite: spec.argv[2].clone(),
        metrics: BTreeMap::from([("add/pass@1".to_string(), metric), ("add/accuracy".to_string(), general)]),
        level: 0.95,
        tokens: 10,
        fingerprint_hash: fingerprint.hash(),
        fingerprint,
        items: Vec::new(),
    };
    report.save(Path::new(after(spec, "--out").unwrap()))?;
    Ok(Status::Finished)
}

fn after<'a>(spec: &'a RunSpec, flag: &str) -> Option<&'a str> {
    let at = spec.argv.iter().position(|a| a == flag)?;
    spec.argv.get(at + 1).map(String::as_str)
}
