//! One run: a commit trained with a seed in a folder of its own, then measured from the trusted commit in another process. Idempotent by
//! folder, so a run is never started twice. What the numbers mean is the judge's.

use crate::campaign::{Campaign, Effect, Request};
use crate::progress::Progress;
use crate::record::{INCUMBENT_REPLICATES, Left, Measured, ReportRef, Status, Subject, Took, Trained, score_key, step};
use hone_evals::evaluate::{Metric, Report};
use hone_evals::suite::{Split, Subset};
use hone_runs::launcher::{Limits, Outcome, RunSpec, Status as Ending};
use hone_runs::{Class, Failure, Result, RunFolder, failure::Context, folder};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::JoinSet;

/// A run to be made.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub round: u32,
    pub step: &'static str,
    pub replicate: i64,
    pub subject: Subject,
    pub seed: u64,
    pub subset: Subset,
}

/// The trainer's `result.json`, as far as it is used here.
#[derive(Deserialize)]
struct TrainerResult {
    checkpoint: PathBuf,
    hash: String,
    steps: u64,
    tokens: u64,
    flops: f64,
}

/// How often a run that fails for reasons not its own is started before the campaign pauses.
const ATTEMPTS: u32 = 3;

/// What a process came to.
enum Came {
    Done(Took),
    Failed(Status, Took),
}

impl Campaign {
    /// Makes those of `jobs` that are not in the ledger yet, side by side as far as there are slots. Their order decides nothing. False when a
    /// pause was asked for before all were begun; those under way are made.
    ///
    /// # Errors
    /// The first failure that is not a candidate's. Runs under way go on in their own processes and are taken up at the next start.
    pub(crate) async fn make(self: &Arc<Self>, jobs: Vec<Job>) -> Result<bool> {
        let free = Arc::new(tokio::sync::Semaphore::new(self.slots()));
        let mut running = JoinSet::new();
        for job in jobs {
            let (campaign, free) = (self.clone(), free.clone());
            running.spawn(async move {
                let _slot = free.acquire_owned().await.context(Class::Other, || "No slot is left".into())?;
                if campaign.requested().await? == Some(Request::Pause) {
                    return Ok(false);
                }
                campaign.run_job(&job).await.map(|()| true)
            });
        }
        let mut all = true;
        while let Some(ended) = running.join_next().await {
            match ended {
                Ok(made) => all &= made?,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(error) => return Err(Failure::new(Class::Other, format!("A run was given up: {error}."))),
            }
        }
        Ok(all)
    }

    async fn run_job(&self, job: &Job) -> Result<()> {
        let known = self.with(|history| history.trained(&job.subject.commit, job.seed).cloned());
        let measured = self.with(|history| history.measured(&job.subject.commit, job.seed, &job.subset).is_some());
        if measured || known.as_ref().is_some_and(|t| t.status != Status::Done) {
            return Ok(());
        }
        let folder = self.folder(&job.subject, job.seed);
        let (round, step, name, seed) = (job.round, job.step, job.subject.name.as_str(), job.seed);
        self.observer.see(&Progress::RunStarted { round, step, name, seed, folder: &folder });
        let trained = match known {
            Some(trained) => trained,
            None => {
                let what = format!("a training run of {name} with seed {seed}");
                let recalled = self.recall(&what, |h| h.trained(&job.subject.commit, seed).cloned())?;
                let trained = match recalled {
                    Some(trained) => trained,
                    None => self.train(job, &folder).await?,
                };
                self.record(job.round, job.step, job.replicate, trained).await?
            }
        };
        let mut trouble = trouble(&trained.status);
        let mut score = None;
        if let (Status::Done, Some(left)) = (&trained.status, &trained.left) {
            let what = format!("a measurement of {name} with seed {seed} on {}", job.subset);
            let recalled = self.recall(&what, |h| h.measured(&job.subject.commit, seed, &job.subset).cloned())?;
            let measured = match recalled {
                Some(measured) => measured,
                None => self.measure(job, &folder, left).await?,
            };
            let measured: Measured = self.record(job.round, job.step, job.replicate, measured).await?;
            trouble = self::trouble(&measured.status);
            score = measured.scores.get(&self.with(|history| history.metric_key())).copied();
        }
        self.observer.see(&Progress::RunFinished { round, step, name, seed, score, trouble: trouble.as_deref() });
        Ok(())
    }

    async fn train(&self, job: &Job, folder: &Path) -> Result<Trained> {
        let trained =
            |status, left, volatile| Trained { subject: job.subject.clone(), seed: job.seed, status, left, volatile };
        let changed = |path: &str| {
            let reason = format!("A run of the candidate changed its own tree: {path}.");
            Status::Invalid { reason }
        };
        let tree = self.exported(&job.subject)?;
        if let Some(path) = self.workspace.differences(&job.subject.commit, &tree)?.first() {
            // Replicates share a tree: what one wrote there, another meets. Only a candidate's runs are suspected of that.
            if self.with(|history| history.heads.contains(&job.subject.commit)) {
                return Err(altered(&tree, path, NOT_AS_EXPORTED));
            }
            return Ok(trained(changed(path), None, Took::default()));
        }
        let mut argv = self.tools.exe.clone();
        argv.extend(["train".into(), self.goal().run.recipe.clone(), "--out".into(), text(folder), "--resume".into()]);
        argv.extend(["--workspace".into(), ".".into()]);
        argv.extend(["--seed".into(), job.seed.to_string(), "--threads".into(), self.tools.threads.to_string()]);
        argv.extend(self.tools.device.iter().flat_map(|device| ["--device".into(), device.clone()]));
        // The baseline's own runs set the compute; every later run may count as much and no more.
        if job.step != step::BASELINE
            && let Some(flops) = self.with(|history| history.compute())
        {
            argv.extend(["--set".into(), format!("compute.flops={flops:.0}")]);
        }
        let spec = self.spec(folder, argv, &tree);
        let came = self.execute(job, spec, false).await?;
        self.effect(Effect::Trained)?;
        let took = match came {
            Came::Failed(status, took) => return Ok(trained(status, None, took)),
            Came::Done(took) => took,
        };
        if let Some(path) = self.workspace.differences(&job.subject.commit, &tree)?.first() {
            return Ok(trained(changed(path), None, took));
        }
        let Some(result) = folder::read_json::<TrainerResult>(&folder.join("result.json"))? else {
            let reason = "The run ended without a result.".into();
            return Ok(trained(Status::Invalid { reason }, None, took));
        };
        let left = Left {
            checkpoint: text(&result.checkpoint),
            hash: result.hash,
            steps: result.steps,
            tokens: result.tokens,
            flops: result.flops,
        };
        Ok(trained(Status::Done, Some(left), took))
    }

    async fn measure(&self, job: &Job, folder: &Path, left: &Left) -> Result<Measured> {
        let trusted = self.trusted_tree()?;
        let mut measured = Measured {
            subject: job.subject.clone(),
            seed: job.seed,
            subset: job.subset,
            status: Status::Done,
            scores: BTreeMap::new(),
            reports: Vec::new(),
            volatile: Took::default(),
        };
        for suite in self.suites(&job.subset) {
            let place = folder.join("eval").join(format!("{}-{}", plain(&job.subset.to_string()), plain(&suite)));
            let to = place.join("report.json");
            let mut argv = self.tools.exe.clone();
            argv.extend(["eval".into(), suite.clone(), "--model".into(), text(&folder.join(&left.checkpoint))]);
            argv.extend(["--workspace".into(), ".".into(), "--split".into(), job.subset.split.to_string()]);
            if let Some((part, of)) = job.subset.fold {
                argv.extend(["--fold".into(), format!("{}/{of}", part + 1)]);
            }
            argv.extend(["--seed".into(), job.seed.to_string(), "--threads".into(), self.tools.threads.to_string()]);
            argv.extend(self.tools.device.iter().flat_map(|device| ["--device".into(), device.clone()]));
            argv.extend(["--out".into(), text(&to)]);
            let spec = self.spec(&place, argv, &trusted);
            let came = self.execute(job, spec, true).await?;
            self.effect(Effect::Measured)?;
            // Asked after each evaluation and before its number is used.
            if let Some(changed) = self.workspace.differences(&self.started().trusted, &trusted)?.first() {
                return reject(&place, altered(&trusted, changed, "was changed during an evaluation"));
            }
            let took = match came {
                Came::Done(took) => took,
                Came::Failed(status, took) => {
                    measured.status = status;
                    measured.volatile = took;
                    return Ok(measured);
                }
            };
            measured.volatile.wall_s += took.wall_s;
            measured.volatile.peak_rss = measured.volatile.peak_rss.max(took.peak_rss);
            self.take_report(&mut measured, &suite, &to, &left.hash).or_else(|failure| reject(&place, failure))?;
        }
        Ok(measured)
    }

    /// Takes a report's scores, once it is certain that it speaks of this checkpoint, these items and this seed.
    fn take_report(&self, measured: &mut Measured, suite: &str, path: &Path, hash: &str) -> Result<()> {
        let refuse = |what: String| {
            Err(Failure::new(
                Class::Integrity,
                format!("{} is not the report that was asked for: {what}.", path.display()),
            )
            .hint("The evaluation and this program may be of different versions; use one."))
        };
        let Ok(bytes) = std::fs::read(path) else {
            return refuse("it is not there".into());
        };
        let report: Report = match serde_json::from_slice(&bytes) {
            Ok(report) => report,
            Err(error) => return refuse(error.to_string()),
        };
        let print = &report.fingerprint;
        if print.model.get("checkpoint").and_then(|c| c.as_str()) != Some(hash) {
            return refuse("it names another checkpoint".into());
        }
        if print.subset != measured.subset || print.seed != measured.seed {
            return refuse(format!("it has {} with seed {}", print.subset, print.seed));
        }
        for wanted in self.metrics().filter(|(of, _)| *of == suite).map(|(_, metric)| metric) {
            match report.metrics.get(wanted) {
                Some(Metric::Score(score)) if score.value.is_finite() => {
                    measured.scores.insert(score_key(suite, wanted), score.value);
                }
                Some(Metric::Invalid { invalid }) => {
                    measured.status = Status::Invalid { reason: format!("{wanted} is invalid: {invalid}") };
                }
                _ => measured.status = Status::Invalid { reason: format!("{wanted} is missing or not finite.") },
            }
        }
        let inside = path.strip_prefix(self.workspace.runs_path(&self.name)).unwrap_or(path);
        measured.reports.push(ReportRef {
            suite: suite.into(),
            path: text(inside),
            sha256: hex::encode(Sha256::digest(&bytes)),
            fingerprint: report.fingerprint_hash,
        });
        Ok(())
    }

    /// A run under the goal's limit of time and under outer guards that no sound run comes near: 512 processes, and the machine's memory but
    /// for a tenth. The guard of memory is not divided by the slots: how many runs go on side by side must change no verdict. None on disk:
    /// the goal's `budget.disk` counts the campaign's folders.
    fn spec(&self, folder: &Path, argv: Vec<String>, cwd: &Path) -> RunSpec {
        let guards = Limits::guards();
        RunSpec {
            folder: folder.to_path_buf(),
            argv,
            cwd: cwd.to_path_buf(),
            env: BTreeMap::new(),
            limits: Limits { wall: Some(self.goal().runs.timeout), ..guards },
            cores: self.tools.threads,
            gpus: self.tools.gpus,
        }
    }

    /// Launches until there is an end that is the run's own, or the campaign has to pause. `trusted`: what it was given is not the candidate's.
    async fn execute(&self, job: &Job, spec: RunSpec, trusted: bool) -> Result<Came> {
        let run = RunFolder::open(&spec.folder)?;
        for attempt in 1.. {
            let live = self.live(&spec.folder);
            let outcome = self.tools.launcher.launch(spec.clone()).await?;
            drop(live);
            let failure = match classify(&outcome, trusted) {
                Ok(came) => return Ok(came),
                Err(failure) => failure,
            };
            // The failure says nothing of the run: its terminal record goes aside, so that the next launch, now or after a pause, starts
            // it again.
            run.reopen()?;
            if failure.class != Class::Infrastructure {
                return Err(failure);
            }
            self.lost(job, attempt, &failure).await?;
            if attempt >= ATTEMPTS {
                let message = format!("The run {} failed {attempt} times: {}", spec.folder.display(), failure.message);
                return Err(Failure { message, ..failure });
            }
            self.observer.see(&Progress::Retrying { name: &job.subject.name, seed: job.seed, failure: &failure });
        }
        unreachable!("the loop above ends by returning")
    }

    /// The tree of a subject, exported where it is not yet.
    fn exported(&self, subject: &Subject) -> Result<PathBuf> {
        let tree = self.workspace.runs_path(&self.name).join(&subject.name).join("tree");
        self.workspace.export(&subject.commit, &tree)?;
        Ok(tree)
    }

    /// The trusted commit's tree, from which everything is measured, intact.
    pub(crate) fn trusted_tree(&self) -> Result<PathBuf> {
        let trusted = Subject { commit: self.started().trusted.clone(), name: "trusted".into() };
        let tree = self.exported(&trusted)?;
        match self.workspace.differences(&trusted.commit, &tree)?.first() {
            None => Ok(tree),
            Some(path) => Err(altered(&tree, path, NOT_AS_EXPORTED)),
        }
    }

    /// The folder of a run.
    pub(crate) fn folder(&self, subject: &Subject, seed: u64) -> PathBuf {
        run_folder(&self.workspace.runs_path(&self.name), subject, seed)
    }

    /// The suites that a subset is measured on: floors only count where it is confirmed.
    fn suites(&self, subset: &Subset) -> Vec<String> {
        let goal = self.goal();
        if subset.split == Split::Dev { vec![goal.metric.suite.clone()] } else { goal.suites() }
    }

    /// All (suite, metric) that the goal names.
    fn metrics(&self) -> impl Iterator<Item = (&str, &str)> {
        let goal = self.goal();
        let floors = goal.floors.iter().map(|f| (f.suite.as_str(), f.name.as_str()));
        [(goal.metric.suite.as_str(), goal.metric.name.as_str())].into_iter().chain(floors)
    }
}

/// The folder of a run in the campaign's.
pub(crate) fn run_folder(runs: &Path, subject: &Subject, seed: u64) -> PathBuf {
    runs.join(&subject.name).join(format!("seed-{seed}"))
}

/// The replicate of an incumbent's i-th run beside a candidate's.
pub(crate) fn incumbent_replicate(i: usize) -> i64 {
    INCUMBENT_REPLICATES + i as i64
}

/// What an outcome says of the run; an error where it says nothing of it: `Infrastructure` to try again, others to pause.
fn classify(outcome: &Outcome, trusted: bool) -> Result<Came> {
    let said = outcome.failure.as_ref().map(|f| f.message.clone());
    let took = Took { wall_s: outcome.wall_s, peak_rss: outcome.peak_rss, said: said.clone() };
    let words = said.unwrap_or_else(|| format!("It ended with {:?}.", outcome.status));
    let other = |class, hint: &str| Err(Failure::new(class, words.clone()).hint(hint));
    let invalid = |reason: String| Ok(Came::Failed(Status::Invalid { reason }, took.clone()));
    let incomplete = |reason: String| Ok(Came::Failed(Status::Incomplete { reason }, took.clone()));
    match outcome.status {
        Ending::Finished => Ok(Came::Done(took)),
        Ending::Failed(2) if trusted => {
            other(Class::Usage, "The suite cannot be used as it is; a new campaign takes up a mended one.")
        }
        Ending::Failed(3) => incomplete("The run reached its budget before it was done.".into()),
        Ending::Failed(4) => other(Class::Integrity, "See the run's own log, mend what changed, and resume."),
        Ending::Failed(5) => invalid("The run diverged: a value was NaN or infinite.".into()),
        Ending::Failed(6 | 127) | Ending::Lost => {
            other(Class::Infrastructure, "See the run's own log, mend the machine, and resume.")
        }
        Ending::Failed(130) | Ending::Stopped => {
            other(Class::Interrupted, "Resume when you like: the run goes on from its last checkpoint.")
        }
        Ending::Failed(143) => {
            other(Class::Terminated, "Resume when you like: the run goes on from its last checkpoint.")
        }
        Ending::Failed(code) => invalid(format!("The run failed with exit code {code}.")),
        Ending::Limit(limit) => incomplete(format!("The run was ended at its limit of {}.", limit_name(limit))),
        // The kernel's way to end what takes too much memory.
        Ending::Signal(9) => incomplete("The run was killed, most likely for lack of memory.".into()),
        Ending::Signal(1 | 2 | 15) => {
            other(Class::Infrastructure, "Something ended the run from outside. Resume when it is gone.")
        }
        Ending::Signal(signal) => invalid(format!("The run crashed with signal {signal}.")),
    }
}

const NOT_AS_EXPORTED: &str = "is not as it was exported";

/// A tree that nobody should have written to.
fn altered(tree: &Path, path: &str, how: &str) -> Failure {
    Failure::new(Class::Integrity, format!("{} {how}.", tree.join(path).display()))
        .hint("Find what wrote there. Then remove the folder, which is made anew, and resume.")
}

/// Lets what is not believed be run again after a resume.
fn reject<T>(folder: &Path, failure: Failure) -> Result<T> {
    RunFolder::open(folder)?.reopen()?;
    Err(failure)
}

fn limit_name(limit: hone_runs::launcher::Limit) -> &'static str {
    use hone_runs::launcher::Limit;
    match limit {
        Limit::Wall => "time",
        Limit::Memory => "memory",
        Limit::Processes => "processes",
        Limit::Disk => "disk",
    }
}

fn trouble(status: &Status) -> Option<String> {
    match status {
        Status::Done => None,
        Status::Invalid { reason } | Status::Incomplete { reason } => Some(reason.clone()),
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A name for a folder: letters and digits stay, the rest becomes hyphens.
fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}
