//! One round, step by step: observe, propose, admit, branch, run and measure, judge, queue, decide, learn. And the closing, which measures
//! all that was kept against the baseline.

use crate::admit::Admitting;
use crate::branch::{self, Candidate};
use crate::campaign::{Campaign, Effect, kept_branch};
use crate::edit;
use crate::goal::{Keeper, Unless};
use crate::history::{History, Score};
use crate::judge::{self, Confirm, Estimate, Floor, Noise, Pair, Screen, Verdict};
use crate::progress::Progress;
use crate::proposal::{Proposal, Proposed, Proposer, Usage};
use crate::record::{
    Admission, Admitted, Closed, Confirmation, Incumbent, Learned, Observed, Policy, Queued, ReportRef, Ruling,
    Screened, Subject, Took, score_key, step,
};
use crate::replay;
use crate::run::{Job, incumbent_replicate};
use hone_evals::evaluate::Report;
use hone_evals::stats;
use hone_evals::suite::Subset;
use hone_runs::{Class, Failure, Result, folder};
use std::sync::Arc;

/// Pairs of scores in the order of their seeds, up to the first that lacks one; and the verdict on that one.
struct Pairs {
    pairs: Vec<Pair>,
    trouble: Option<(Verdict, String)>,
}

impl Campaign {
    /// Makes a round, from the first step without an event. Says whether it had a candidate; None when a pause was asked for.
    pub(crate) async fn round(self: &Arc<Self>, round: u32, proposer: &dyn Proposer) -> Result<Option<bool>> {
        let observed = self
            .step(round, step::OBSERVE, 0, async {
                Ok(self.with(|history| Observed { incumbent: history.head.clone(), notes: history.notes() }))
            })
            .await?;
        if !self.renew(round, &observed.incumbent).await? {
            return Ok(None);
        }
        let proposed = self.step(round, step::PROPOSE, 0, self.propose(round, &observed, proposer)).await?;
        let proposal = match &proposed.answer {
            Ok(proposal) => proposal,
            Err(failure) => return self.fruitless(round, &failure.message).await.map(Some),
        };
        let (title, hypothesis) = (proposal.title.as_str(), proposal.hypothesis.as_str());
        self.observer.see(&Progress::Proposed { round, title, hypothesis });
        let admission = self.step(round, step::ADMIT, 0, async { self.admit(&observed, proposal) }).await?;
        let admitted = match &admission {
            Admission::Admitted(admitted) => admitted,
            Admission::Refused(refusal) => return self.fruitless(round, &refusal.message).await.map(Some),
        };
        let candidate = self.step(round, step::BRANCH, 0, async { self.branch(round, &observed, proposal) }).await?;
        branch::publish(&self.workspace, &candidate.branch, &candidate.commit)?;
        self.effect(Effect::Published)?;

        let subject = self.subject_of(&candidate);
        let Some(screened) = self.screen(round, &subject, &observed.incumbent).await? else { return Ok(None) };
        let Some(ruling) = self.rule(round, &subject, &observed.incumbent, &screened, admitted).await? else {
            return Ok(None);
        };
        self.observer.see(&Progress::Verdict { round, verdict: ruling.verdict, reason: &ruling.reason });
        if ruling.verdict == Verdict::Better {
            self.queue(round, &candidate, proposal, &ruling).await?;
            self.decide(round, &observed.incumbent, &candidate, admitted, &ruling).await?;
        }
        self.learn(round, proposal, &ruling).await?;
        Ok(Some(true))
    }

    /// Runs an incumbent that is new since the baseline on screening seeds of its own: what it gained when it was chosen is not its score.
    /// False when a pause was asked for.
    async fn renew(self: &Arc<Self>, round: u32, incumbent: &Incumbent) -> Result<bool> {
        let jobs = (0..self.goal().runs.replicates.fewest).map(|i| Job {
            round,
            step: step::INCUMBENT,
            replicate: i as i64,
            subject: incumbent.subject.clone(),
            seed: self.started().screening_seed(incumbent.since, i),
            subset: Subset::DEV,
        });
        self.make(jobs.collect()).await
    }

    async fn propose(&self, round: u32, observed: &Observed, proposer: &dyn Proposer) -> Result<Proposed> {
        match proposer.propose(&self.observation(round, observed)?).await {
            // An answer, and the last one: going on later would meet the same budget.
            Err(failure) if failure.class == Class::Budget => {
                Ok(Proposed { answer: Err(failure), transcript: Vec::new(), usage: Usage::default() })
            }
            other => other,
        }
    }

    fn admit(&self, observed: &Observed, proposal: &Proposal) -> Result<Admission> {
        let history = self.history();
        let admitting = Admitting {
            workspace: &self.workspace,
            history: &history,
            scope: &self.scope,
            parent: &observed.incumbent.subject.commit,
            check_recipe: &*self.tools.check_recipe,
        };
        admitting.admit(proposal)
    }

    /// Writes the candidate's objects. Its id is a function of the proposal and the parent, so a repeat writes the same.
    fn branch(&self, round: u32, observed: &Observed, proposal: &Proposal) -> Result<Candidate> {
        let parent = &observed.incumbent.subject.commit;
        let files = crate::admit::editable_files(&self.workspace, &self.scope, parent)?;
        let changed = edit::apply_edits(&files, &proposal.edits)?;
        let name = format!("hone/{}/{}", self.name, branch::branch_name(round, &proposal.title));
        let message = format!(
            "{}\n\n{}\n\nHone-Campaign: {}\nHone-Round: {round}\nHone-Proposer: {}\n",
            one_line(&proposal.title),
            proposal.hypothesis.trim(),
            self.name,
            one_line(&proposal.source)
        );
        let candidate = branch::write(&self.workspace, parent, &changed, &message, &name)?;
        if self.workspace.protected_hash(&candidate.commit, |path| self.scope.allows(path))? != self.started().protected
        {
            return Err(Failure::new(Class::Integrity, format!("The candidate {name} differs where it may not."))
                .hint("This is a fault of Hone; please report it with the ledger."));
        }
        self.effect(Effect::Written)?;
        Ok(candidate)
    }

    /// Ends a round that has no candidate.
    async fn fruitless(&self, round: u32, reason: &str) -> Result<bool> {
        self.observer.see(&Progress::Refused { round, reason });
        self.step(round, step::LEARN, 0, async {
            let volatile = Took { wall_s: self.take_wall(), ..Took::default() };
            Ok(Learned { forecast_error: None, lesson: format!("No candidate: {reason}"), volatile })
        })
        .await?;
        Ok(false)
    }

    /// Screens on the incumbent's screening seeds and the dev items. Decides only at the numbers of seeds that the judge asks for: runs that
    /// are made beyond them, to fill the machine, change nothing. None when a pause was asked for.
    async fn screen(
        self: &Arc<Self>,
        round: u32,
        subject: &Subject,
        incumbent: &Incumbent,
    ) -> Result<Option<Screened>> {
        if let Some(stored) = self.with(|history| history.stored::<Screened>(round, step::SCREENED, 0))? {
            return Ok(Some(stored));
        }
        let judge = self.judge(round);
        let fewest = judge.replicates[0];
        let usual = self.with(|history| history.screening_scores(incumbent));
        let seed = |i: usize| self.started().screening_seed(incumbent.since, i);
        // Batches follow from the judge's answers alone, so that a resumed screening makes the runs of the unbroken one.
        let mut upto = 0;
        let screen = loop {
            let found = self.pairs(subject, incumbent, Subset::DEV, &self.metric_key(), (0..upto).map(seed));
            let total = match judge::screen(&judge, &usual, &found.pairs) {
                Screen::More { total } => total,
                decided => break decided,
            };
            if let Some((verdict, reason)) = found.trouble {
                break Screen::Stop { verdict, estimate: None, reason };
            }
            let Some(free) = self.may_run(round).await? else { return Ok(None) };
            if let Err(reason) = free {
                break Screen::Stop { verdict: Verdict::Incomplete, estimate: None, reason };
            }
            let have = upto;
            upto = total.max((have + self.slots()).min(fewest));
            let job = |i: usize| Job {
                round,
                step: step::SCREEN,
                replicate: i as i64,
                subject: subject.clone(),
                seed: seed(i),
                subset: Subset::DEV,
            };
            if !self.make((have..upto).map(job).collect()).await? {
                return Ok(None);
            }
        };
        let screened =
            self.with(|history| Screened { confirmation: self.confirmation(history, round, &screen), screen });
        self.record(round, step::SCREENED, 0, screened).await.map(Some)
    }

    /// Which confirmation a promising screen is followed by: each has its own level and, in turn, a part of the held-out items.
    fn confirmation(&self, history: &History, round: u32, screen: &Screen) -> Option<Confirmation> {
        let Screen::Promising(_) = screen else { return None };
        let (begun, better) = history.confirmations(round);
        let folds = self.goal().metric.folds;
        let earlier = self.started().looks;
        Some(Confirmation {
            index: begun + 1,
            subset: Subset::held_out_fold((earlier + begun) % (folds - 1), folds),
            looks: (earlier + begun) / (folds - 1) + 1,
            alpha: judge::alpha_of(&self.goal().gate, begun + 1, better),
        })
    }

    /// The verdict: screening's, or that of a confirmation on fresh seeds and other items. None when a pause was asked for.
    async fn rule(
        self: &Arc<Self>,
        round: u32,
        subject: &Subject,
        incumbent: &Incumbent,
        screened: &Screened,
        admitted: &Admitted,
    ) -> Result<Option<Ruling>> {
        if let Some(stored) = self.with(|history| history.stored::<Ruling>(round, step::JUDGE, 0))? {
            return Ok(Some(stored));
        }
        let mut ruling = match (&screened.screen, &screened.confirmation) {
            (Screen::Promising(estimate), Some(confirmation)) => {
                match self.confirm(round, subject, incumbent, estimate, confirmation).await? {
                    Some(ruling) => ruling,
                    None => return Ok(None),
                }
            }
            (Screen::Stop { verdict, estimate, reason }, _) => Ruling::early(*verdict, reason.clone(), *estimate),
            _ => return Err(Failure::new(Class::Integrity, format!("Round {round} has no usable screening."))),
        };
        ruling.flags.extend(admitted.flags.iter().cloned());
        if ruling.estimate().is_some() {
            let decided = match screened.confirmation.filter(|_| ruling.confirmation.is_some()) {
                Some(confirmation) => (self.started().confirmation_seed(round, 0), confirmation.subset),
                None => (self.started().screening_seed(incumbent.since, 0), Subset::DEV),
            };
            ruling.flags.extend(self.confounds(subject, &incumbent.subject, decided)?);
        }
        self.record(round, step::JUDGE, 0, ruling).await.map(Some)
    }

    async fn confirm(
        self: &Arc<Self>,
        round: u32,
        subject: &Subject,
        incumbent: &Incumbent,
        screened: &Estimate,
        confirmation: &Confirmation,
    ) -> Result<Option<Ruling>> {
        let judge = self.judge(round);
        let most = judge.replicates[1];
        let subset = confirmation.subset;
        let seeds = |n: usize| (0..n).map(|i| self.started().confirmation_seed(round, i));
        let mut upto = 0;
        loop {
            let found = self.pairs(subject, incumbent, subset, &self.metric_key(), seeds(upto));
            let total = match judge::confirm(&judge, confirmation.alpha, screened, &found.pairs) {
                Confirm::More { total } => total,
                Confirm::Done { verdict, estimate, p, level, reason } => {
                    let mut ruling = Ruling::early(verdict, reason, Some(*screened));
                    (ruling.confirmation, ruling.p, ruling.level) = (estimate, Some(p), Some(level));
                    let n = estimate.map_or(0, |e| e.n);
                    if verdict == Verdict::Better {
                        self.hold_floors(&mut ruling, subject, incumbent, subset, seeds(n).collect());
                        if confirmation.looks > 1 {
                            let times = match confirmation.looks {
                                2 => "once".to_string(),
                                looks => format!("{} times", looks - 1),
                            };
                            ruling.flags.push(format!("its held-out items were used {times} before"));
                        }
                    }
                    return Ok(Some(ruling));
                }
            };
            if let Some((verdict, reason)) = found.trouble {
                return Ok(Some(Ruling::early(verdict, reason, Some(*screened))));
            }
            let Some(free) = self.may_run(round).await? else { return Ok(None) };
            if let Err(reason) = free {
                return Ok(Some(Ruling::early(Verdict::Incomplete, reason, Some(*screened))));
            }
            let have = upto;
            upto = total.max((have + self.slots() / 2).min(most));
            let jobs = self.paired_jobs(round, step::CONFIRM, [subject, &incumbent.subject], subset, have..upto);
            if !self.make(jobs).await? {
                return Ok(None);
            }
        }
    }

    /// Runs of a candidate and an incumbent on the same fresh seeds.
    fn paired_jobs(
        &self,
        round: u32,
        step: &'static str,
        [candidate, incumbent]: [&Subject; 2],
        subset: Subset,
        range: std::ops::Range<usize>,
    ) -> Vec<Job> {
        let seed = |i| self.started().confirmation_seed(round, i);
        let job = |i, subject: &Subject, replicate| Job {
            round,
            step,
            replicate,
            subject: subject.clone(),
            seed: seed(i),
            subset,
        };
        range.flat_map(|i| [job(i, candidate, i as i64), job(i, incumbent, incumbent_replicate(i))]).collect()
    }

    /// What besides the change differs between the two sides of a comparison, by the runs of one seed.
    fn confounds(
        &self,
        candidate: &Subject,
        incumbent: &Subject,
        (seed, subset): (u64, Subset),
    ) -> Result<Vec<String>> {
        let [(ours, our_report), (theirs, their_report)] = [candidate, incumbent].map(|subject| {
            self.with(|history| {
                let left = history.trained(&subject.commit, seed).and_then(|t| t.left.clone());
                let report = history.measured(&subject.commit, seed, &subset).and_then(|m| m.reports.first().cloned());
                (left, report)
            })
        });
        let mut flags = Vec::new();
        if let (Some(ours), Some(theirs)) = (ours, theirs) {
            let ratios =
                [(ours.flops / theirs.flops, "operations"), (ours.tokens as f64 / theirs.tokens as f64, "tokens")];
            let more = ratios.iter().filter(|(ratio, _)| *ratio > 1.1);
            flags.extend(more.map(|(ratio, what)| format!("a run counted {ratio:.2} times the incumbent's {what}")));
        }
        let print = |report: Option<ReportRef>| {
            let path = self.workspace.runs_path(&self.name).join(report?.path);
            Some(folder::read_json::<Report>(&path).ok()??.fingerprint)
        };
        let (Some(ours), Some(theirs)) = (print(our_report), print(their_report)) else {
            flags.push("the reports behind it cannot be compared".into());
            return Ok(flags);
        };
        let (model, rest): (Vec<_>, Vec<_>) =
            ours.differences(&theirs).into_iter().partition(|name| name.starts_with("model."));
        if !rest.is_empty() {
            return Err(Failure::new(Class::Integrity, format!("The two sides were measured differently: {}.", rest.join(", ")))
                .hint("Hone was changed since the campaign began. Go on with the version that it began with, or start a new campaign, which measures a new baseline."));
        }
        if !model.is_empty() {
            flags.push(format!("measured with another {}", model.join(", ")));
        }
        Ok(flags)
    }

    /// Asks the floors on the confirmation's own runs. A broken floor is worse, whatever was won; one without evidence does not hold.
    fn hold_floors(
        &self,
        ruling: &mut Ruling,
        subject: &Subject,
        incumbent: &Incumbent,
        subset: Subset,
        seeds: Vec<u64>,
    ) {
        for floor in &self.goal().floors {
            let key = score_key(&floor.suite, &floor.name);
            let found = self.pairs(subject, incumbent, subset, &key, seeds.iter().copied());
            let held = match found.trouble {
                None => judge::floor(floor.direction, floor.max_drop, Noise::default(), &found.pairs),
                Some(_) => None,
            };
            match held {
                Some(Floor::Held) => {}
                Some(Floor::Unclear) => ruling.flags.push(format!("{} may have fallen below its floor", floor.name)),
                Some(Floor::Broken) => {
                    ruling.verdict = Verdict::Worse;
                    ruling.reason =
                        format!("{} But {} fell by more than {}.", ruling.reason, floor.name, floor.max_drop);
                }
                None => {
                    ruling.verdict = Verdict::Incomplete;
                    ruling.reason = format!("{} But {} has no score on every seed.", ruling.reason, floor.name);
                }
            }
            ruling.floors.insert(key, held);
        }
    }

    /// The scores of both on `seeds`, as far as they go.
    fn pairs(
        &self,
        subject: &Subject,
        incumbent: &Incumbent,
        subset: Subset,
        key: &str,
        seeds: impl Iterator<Item = u64>,
    ) -> Pairs {
        self.with(|history| {
            let mut pairs = Vec::new();
            for seed in seeds {
                let score = |commit: &str| history.score(commit, seed, &subset, key);
                let trouble = match (score(&subject.commit), score(&incumbent.subject.commit)) {
                    (Some(Score::Is(candidate)), Some(Score::Is(incumbent))) => {
                        pairs.push(Pair { seed, candidate, incumbent });
                        continue;
                    }
                    (Some(Score::Invalid(why)), _) => (Verdict::Invalid, format!("With seed {seed}: {why}")),
                    (Some(Score::Incomplete(why)), _) => (Verdict::Incomplete, format!("With seed {seed}: {why}")),
                    // Not the candidate's fault: there is nothing to compare it with.
                    (_, Some(Score::Invalid(why) | Score::Incomplete(why))) => {
                        (Verdict::Incomplete, format!("The incumbent has no score with seed {seed}: {why}"))
                    }
                    _ => (Verdict::Incomplete, format!("There is no run with seed {seed}.")),
                };
                return Pairs { pairs, trouble: Some(trouble) };
            }
            Pairs { pairs, trouble: None }
        })
    }

    fn metric_key(&self) -> String {
        score_key(&self.goal().metric.suite, &self.goal().metric.name)
    }

    /// Asked before runs are made: None for a pause, an error for why there may be no more.
    async fn may_run(&self, round: u32) -> Result<Option<std::result::Result<(), String>>> {
        use crate::campaign::Request;
        if let Some(reason) = self.cut(round) {
            return Ok(Some(Err(reason)));
        }
        Ok(match self.requested().await? {
            Some(Request::Pause) => None,
            Some(Request::Stop) => Some(Err(replay::STOPPED.into())),
            None => Some(match self.spent()? {
                Some(budget) => Err(replay::reached(&budget)),
                None => Ok(()),
            }),
        })
    }

    async fn queue(&self, round: u32, candidate: &Candidate, proposal: &Proposal, ruling: &Ruling) -> Result<()> {
        self.step(round, step::QUEUE, 0, async {
            let metric = &self.goal().metric.name;
            let numbers = ruling.estimate().map_or(String::new(), |e| match e.interval {
                Some([low, high]) => format!(": {metric} {:+.4} ({low:+.4} to {high:+.4}, {} seeds)", e.effect, e.n),
                None => format!(": {metric} {:+.4} ({} seeds)", e.effect, e.n),
            });
            Ok(Queued { commit: candidate.commit.clone(), claim: format!("{}{numbers}", one_line(&proposal.title)) })
        })
        .await
        .map(drop)
    }

    /// The policy's word, where the goal has a policy. The item stays in the queue either way.
    async fn decide(
        &self,
        round: u32,
        incumbent: &Incumbent,
        candidate: &Candidate,
        admitted: &Admitted,
        ruling: &Ruling,
    ) -> Result<()> {
        if self.goal().review.keep != Keeper::Policy {
            return Ok(());
        }
        // People decide in other processes: the incumbent must not move between the look and the word.
        let lock = self.workspace.lock(&decision_lock(&self.name))?;
        self.sync().await?;
        let policy = self
            .step(round, step::DECIDE, 0, async {
                let flagged = !ruling.flags.is_empty() || !admitted.flags.is_empty();
                let (keep, reason) = if self.with(|history| history.head != *incumbent) {
                    (false, "The incumbent changed during the round: what was measured is not what would be kept.")
                } else if flagged && self.goal().review.unless == Some(Unless::Flagged) {
                    (false, "It carries a flag, which is for a person.")
                } else {
                    (true, "A confirmed improvement.")
                };
                let head = keep.then(|| Incumbent { subject: self.subject_of(candidate), since: round });
                Ok(Policy { head, reason: reason.into() })
            })
            .await?;
        if let Some(head) = &policy.head {
            let (known, now) = self.with(|history| (history.heads.clone(), history.head.clone()));
            branch::advance(&self.workspace, &kept_branch(&self.name), &known, &now.subject.commit)?;
            self.effect(Effect::Kept)?;
            self.observer.see(&Progress::Kept { round, commit: &head.subject.commit });
        }
        drop(lock);
        Ok(())
    }

    async fn learn(&self, round: u32, proposal: &Proposal, ruling: &Ruling) -> Result<()> {
        self.step(round, step::LEARN, 0, async {
            let forecast_error = ruling.estimate().map(|e| proposal.predicted_effect - e.effect);
            let verdict = format!("{:?}", ruling.verdict);
            let lesson = format!("{}: {verdict}. {}", one_line(&proposal.title), ruling.reason);
            let volatile = Took { wall_s: self.take_wall(), ..Took::default() };
            Ok(Learned { forecast_error, lesson, volatile })
        })
        .await
        .map(drop)
    }

    /// Measures the kept head against the baseline on seeds and items that no decision saw; nothing where nothing is kept. False when a
    /// pause was asked for.
    pub(crate) async fn closing(self: &Arc<Self>, round: u32) -> Result<bool> {
        if self.with(|history| history.closed.is_some()) {
            return Ok(true);
        }
        let (head, baseline) = self.with(|history| (history.head.clone(), history.baseline()));
        if head == baseline {
            return Ok(true);
        }
        let n = self.goal().runs.replicates.most;
        let folds = self.goal().metric.folds;
        let subset = Subset::held_out_fold(folds - 1, folds);
        let jobs = self.paired_jobs(round, step::CLOSING, [&head.subject, &baseline.subject], subset, 0..n);
        self.observer.see(&Progress::Closing { runs: jobs.len() });
        if !self.make(jobs).await? {
            return Ok(false);
        }
        let seeds = (0..n).map(|i| self.started().confirmation_seed(round, i));
        // Seeds without both scores are left out, and their number is seen in the counts.
        let pairs: Vec<Pair> = seeds
            .flat_map(|seed| {
                self.pairs(&head.subject, &baseline, subset, &self.metric_key(), std::iter::once(seed)).pairs
            })
            .collect();
        let differences: Vec<f64> = pairs.iter().map(|p| p.candidate - p.incumbent).collect();
        let total = stats::t_mean(&differences, 0.95).ok();
        let total =
            total.map(|e| Estimate { n: e.n, effect: e.mean, interval: Some([e.interval.low, e.interval.high]) });
        let closed = Closed {
            head: head.subject.commit.clone(),
            subset,
            kept: pairs.iter().map(|p| p.candidate).collect(),
            baseline: pairs.iter().map(|p| p.incumbent).collect(),
            total,
            volatile: Took { wall_s: self.take_wall(), ..Took::default() },
        };
        self.record(round, step::CLOSING, 0, closed).await.map(|_| true)
    }
}

/// The lock under which decisions are made, by the policy or by people.
pub(crate) fn decision_lock(campaign: &str) -> String {
    format!("{campaign}.decisions")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
