//! The reinforcement stage: sample groups of completions, score them with the task's verifier, and update on them once or
//! more. Not for the losses and advantages themselves (`loss.rs`, `advantage.rs`), nor for sampling (`rollout.rs`).
//!
//! What is trained are the ids that were sampled, at the temperature they were sampled at, never text read anew. On the first
//! pass, before any update, the trainer's log-probs must be the sampler's; every step measures whether they are.

use crate::{
    advantage::{advantages, all_equal},
    config::ModelConfig,
    data::{Batch, Packer},
    learner::{Learner, Metrics, Step, diverged},
    loss::{self, Losses, Terms},
    recipe::{Overlong, Rl},
    rollout::{self, RolloutOptions, Sample},
    tokenizer::Tokenizer,
};
use hone_evals::{
    model::Finish,
    task::{Problem, Task},
};
use hone_runs::{Class, Failure, Result, draws};
use rand::RngExt;

/// Where a stage draws from.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub task: &'a dyn Task,
    pub tokenizer: &'a Tokenizer,
    pub seed: u64,
    /// The stage's index in the recipe: stages of one recipe draw apart.
    pub stage: u64,
}

/// The completions of one prompt.
struct Group {
    prompt: Vec<u32>,
    samples: Vec<Sample>,
    /// The task's own scores.
    scores: Vec<f64>,
    /// One a sample, from the scores as shaped by the stage.
    advantages: Vec<f64>,
    /// Whether a sample is trained.
    trained: Vec<bool>,
}

/// Running means over the completions of a step.
#[derive(Default)]
struct Tally {
    samples: f64,
    score: f64,
    right: f64,
    truncated: f64,
    repeated: f64,
    length_right: f64,
    length_wrong: f64,
    groups: f64,
    equal: f64,
}

/// One step: a batch of groups, `epochs · minibatches` updates. Returns the last update, unless every group was dropped, and the
/// step's metrics.
pub(crate) fn step(
    spec: &Rl,
    source: Source,
    number: u64,
    highest_lr: f64,
    progress: f64,
    learner: &mut Learner,
) -> Result<(Option<Step>, Metrics)> {
    let mut tally = Tally::default();
    let groups = sample(spec, source, number, learner, &mut tally)?;
    let mut metrics = tally.metrics();
    metrics.push(("rl/groups", groups.len() as f64));
    if groups.is_empty() {
        return Ok((None, metrics));
    }
    let size = groups.len().div_ceil(spec.minibatches);
    let minibatches: Vec<Vec<Micro>> = groups.chunks(size).map(|groups| pack(spec, groups)).collect();
    let mut trained = Trained::default();
    let mut last = None;
    for epoch in 0..spec.epochs {
        for (i, minibatch) in minibatches.iter().enumerate() {
            let first = epoch == 0 && i == 0;
            if let Some(step) = update(spec, minibatch, first, epoch == 0, highest_lr, progress, learner, &mut trained)?
            {
                last = Some(step);
            }
        }
    }
    metrics.extend(trained.metrics());
    Ok((last, metrics))
}

/// Samples groups until the batch is full, or the places of dropped ones have been offered anew `resample` times.
fn sample(spec: &Rl, source: Source, number: u64, learner: &mut Learner, tally: &mut Tally) -> Result<Vec<Group>> {
    let Source { task, tokenizer, seed, stage } = source;
    let (prompts_of, rollouts_of) = (format!("rl prompt {stage}"), format!("rl rollout {stage}"));
    let (mut groups, mut drawn) = (Vec::new(), 0);
    for attempt in 0..=spec.resample as u64 {
        let mut problems = Vec::new();
        for _ in groups.len()..spec.prompts {
            problems.push(task.draw(&mut draws(seed, &prompts_of, number, drawn))?);
            drawn += 1;
        }
        let prompts = problems.iter().map(|p| encode(p, task, tokenizer)).collect::<Result<Vec<_>>>()?;
        let options = RolloutOptions {
            temperature: spec.temperature as f32,
            max_tokens: spec.max_tokens,
            stop: vec![tokenizer.end()],
            stop_sequences: Vec::new(),
            n: spec.group,
            repetition: spec.repetition,
            seed: draws(seed, &rollouts_of, number, attempt).random(),
        };
        let sampled = rollout::generate(&learner.decoder, &prompts, &options);
        for ((problem, prompt), samples) in problems.iter().zip(prompts).zip(sampled) {
            let lengths = samples.iter().map(|s| s.tokens.len());
            learner.spent.rollout(&learner.decoder.config, prompt.len(), lengths);
            let group = judge(spec, problem, task, tokenizer, prompt, samples)?;
            let equal = all_equal(&group.scores);
            tally.add(&group, equal);
            if !(equal && spec.dynamic_sampling) {
                groups.push(group);
            }
        }
        if groups.len() == spec.prompts {
            break;
        }
    }
    Ok(groups)
}

/// Tokens of the longest of `count` prompts.
pub(crate) fn longest_prompt(task: &dyn Task, tokenizer: &Tokenizer, count: u64) -> Result<usize> {
    (0..count).try_fold(0, |most, i| {
        let problem = task.draw(&mut draws(0, "longest prompt", 0, i))?;
        Ok(most.max(encode(&problem, task, tokenizer)?.len()))
    })
}

fn encode(problem: &Problem, task: &dyn Task, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let prompt = tokenizer.encode(&problem.prompt)?;
    if prompt.is_empty() {
        return Err(Failure::new(Class::Usage, format!("The task `{}` has no prompts to answer.", task.name()))
            .hint("train it with an sft stage"));
    }
    Ok(prompt)
}

/// Scores a group and gives each sample its advantage.
fn judge(
    spec: &Rl,
    problem: &Problem,
    task: &dyn Task,
    tokenizer: &Tokenizer,
    prompt: Vec<u32>,
    samples: Vec<Sample>,
) -> Result<Group> {
    let scores: Vec<f64> = samples.iter().map(|s| task.verify(problem, &tokenizer.decode(&s.tokens))).collect();
    if let Some(score) = scores.iter().find(|s| !s.is_finite()) {
        return Err(Failure::new(
            Class::Other,
            format!("The task `{}` gave a completion the score {score}.", task.name()),
        )
        .hint("a score is a finite number; mend the task's verifier"));
    }
    let rewards: Vec<f64> =
        scores.iter().zip(&samples).map(|(score, s)| score + penalty(spec, s.tokens.len())).collect();
    let cut = |s: &Sample| s.finish == Finish::Length;
    let trained = samples.iter().map(|s| !(spec.overlong == Overlong::Mask && cut(s))).collect();
    Ok(Group { prompt, advantages: advantages(spec.advantage, &rewards), samples, scores, trained })
}

/// DAPO's soft overlong penalty, 0 down to −1 over the last fifth of the window.
fn penalty(spec: &Rl, length: usize) -> f64 {
    if spec.overlong != Overlong::Penalty {
        return 0.0;
    }
    let (most, cache) = (spec.max_tokens as f64, spec.max_tokens as f64 / 5.0);
    ((most - length as f64) / cache - 1.0).clamp(-1.0, 0.0)
}

/// A forward pass's worth of a minibatch, packed once for all epochs.
struct Micro<'a> {
    batch: Batch,
    columns: Columns<'a>,
    /// The part of the minibatch's rows that are here.
    share: f64,
}

/// What goes with a batch's terms, one entry a term.
#[derive(Default)]
struct Columns<'a> {
    behaviour: Vec<f32>,
    advantage: Vec<f32>,
    weight: Vec<f32>,
    /// The sampler's expert ids.
    routes: Vec<&'a [u32]>,
}

/// Packs the trained completions of whole groups, as many groups a pass as fit.
fn pack<'a>(spec: &Rl, groups: &'a [Group]) -> Vec<Micro<'a>> {
    let mut weights = weights(spec, groups).into_iter();
    let (mut packer, mut columns, mut micros) = (Packer::default(), Columns::default(), Vec::new());
    for group in groups {
        let weights: Vec<f32> = weights.by_ref().take(group.samples.len()).collect();
        let kept: Vec<usize> = (0..group.samples.len()).filter(|&i| group.trained[i]).collect();
        let bodies: Vec<&[u32]> = kept.iter().map(|&i| group.samples[i].tokens.as_slice()).collect();
        let most = group.prompt.len() + bodies.iter().map(|b| b.len() - 1).sum::<usize>();
        if packer.rows() > 0 && packer.rows() + most > spec.micro_batch {
            micros.push(Micro { batch: packer.finish(), columns: std::mem::take(&mut columns), share: 0.0 });
        }
        if !kept.is_empty() {
            packer.add_group(&group.prompt, &bodies, spec.merge);
        }
        for i in kept {
            let Sample { tokens, logprobs, routes, .. } = &group.samples[i];
            columns.behaviour.extend_from_slice(logprobs);
            columns.advantage.extend(std::iter::repeat_n(group.advantages[i] as f32, tokens.len()));
            columns.weight.extend(std::iter::repeat_n(weights[i], tokens.len()));
            columns.routes.extend(routes.iter().map(Vec::as_slice));
        }
    }
    if packer.rows() > 0 {
        micros.push(Micro { batch: packer.finish(), columns, share: 0.0 });
    }
    let rows: usize = micros.iter().map(|m| m.batch.forest.rows()).sum();
    micros.iter_mut().for_each(|m| m.share = m.batch.forest.rows() as f64 / rows as f64);
    micros
}

/// The term weight of every sample of a minibatch; masked ones have no terms, and count as trajectories without any.
fn weights(spec: &Rl, groups: &[Group]) -> Vec<f32> {
    let mut ranges = Vec::new();
    let mut lengths = Vec::new();
    for group in groups {
        let start = lengths.len();
        lengths.extend(group.samples.iter().zip(&group.trained).map(|(s, &on)| if on { s.tokens.len() } else { 0 }));
        ranges.push(start..lengths.len());
    }
    loss::weights(spec.normaliser(), &ranges, &lengths, spec.max_tokens)
}

/// One update on a minibatch; None where all its completions are masked.
fn update(
    spec: &Rl,
    minibatch: &[Micro],
    first: bool,
    first_epoch: bool,
    highest_lr: f64,
    progress: f64,
    learner: &mut Learner,
    trained: &mut Trained,
) -> Result<Option<Step>> {
    if minibatch.is_empty() {
        return Ok(None);
    }
    let temperature = spec.temperature as f32;
    let (mut logprob, mut entropy, mut losses) = (Vec::new(), Vec::new(), Losses::default());
    let mut total = 0.0;
    for micro in minibatch {
        learner.score(&micro.batch, temperature, &mut logprob, &mut entropy);
        if first {
            trained.drift.compare(micro, &logprob, learner.routes(), &learner.decoder.config);
        }
        let terms = Terms {
            logprob: &logprob,
            behaviour: &micro.columns.behaviour,
            advantage: &micro.columns.advantage,
            trajectories: &micro.batch.trajectories,
        };
        loss::policy(spec.algorithm, spec.band(), terms, &mut losses);
        for (loss, w) in losses.loss.iter().zip(&micro.columns.weight) {
            total += f64::from(loss * w);
        }
        losses.d_logprob.iter_mut().zip(&micro.columns.weight).for_each(|(d, w)| *d *= w);
        learner.backward(&micro.batch, temperature, &losses.d_logprob, micro.share);
        trained.add(&losses, first_epoch.then_some(&entropy));
    }
    if !total.is_finite() {
        return Err(diverged("the loss is not finite"));
    }
    trained.loss += total;
    trained.updates += 1.0;
    learner.update(highest_lr, progress).map(Some)
}

impl Tally {
    fn add(&mut self, group: &Group, equal: bool) {
        self.groups += 1.0;
        self.equal += f64::from(u8::from(equal));
        for (sample, &score) in group.samples.iter().zip(&group.scores) {
            let length = sample.tokens.len() as f64;
            self.samples += 1.0;
            self.score += score;
            self.truncated += f64::from(u8::from(sample.finish == Finish::Length));
            self.repeated += f64::from(u8::from(sample.finish == Finish::Repetition));
            if score >= 1.0 {
                self.right += 1.0;
                self.length_right += length;
            } else {
                self.length_wrong += length;
            }
        }
    }

    fn metrics(&self) -> Metrics {
        let wrong = self.samples - self.right;
        let mut metrics = vec![
            ("rl/reward", self.score / self.samples),
            ("rl/pass_rate", self.right / self.samples),
            ("rl/zero_std_share", self.equal / self.groups),
            ("rl/truncated_share", self.truncated / self.samples),
            ("rl/repetition_share", self.repeated / self.samples),
            ("rl/length", (self.length_right + self.length_wrong) / self.samples),
        ];
        if self.right > 0.0 {
            metrics.push(("rl/length_right", self.length_right / self.right));
        }
        if wrong > 0.0 {
            metrics.push(("rl/length_wrong", self.length_wrong / wrong));
        }
        metrics
    }
}

/// Sums over the passes of a step.
#[derive(Default)]
struct Trained {
    drift: Drift,
    loss: f64,
    updates: f64,
    terms: f64,
    ratio: f64,
    ratio_max: f64,
    clipped: f64,
    kl: f64,
    entropy: f64,
    entropies: f64,
}

impl Trained {
    fn add(&mut self, losses: &Losses, entropy: Option<&Vec<f32>>) {
        for (&ratio, &clipped) in losses.ratio.iter().zip(&losses.clipped) {
            let ratio = f64::from(ratio);
            self.terms += 1.0;
            self.ratio += ratio;
            self.ratio_max = self.ratio_max.max(ratio);
            self.clipped += f64::from(u8::from(clipped));
            // Schulman's k3 of the sampling policy from the trained one: r − 1 − log r under samples of the former.
            self.kl += ratio - 1.0 - ratio.ln();
        }
        if let Some(entropy) = entropy {
            self.entropy += entropy.iter().map(|&e| f64::from(e)).sum::<f64>();
            self.entropies += entropy.len() as f64;
        }
    }

    fn metrics(&self) -> Metrics {
        let Self { updates, terms, .. } = self;
        if *updates == 0.0 {
            return Vec::new();
        }
        let mut metrics = vec![
            ("train/loss", self.loss / updates),
            ("rl/entropy", self.entropy / self.entropies),
            ("rl/ratio_mean", self.ratio / terms),
            ("rl/ratio_max", self.ratio_max),
            ("rl/clipped_share", self.clipped / terms),
            ("rl/kl", self.kl / terms),
        ];
        metrics.extend(self.drift.metrics());
        metrics
    }
}

/// How far the trainer's first look at sampled tokens is from the sampler's.
#[derive(Default)]
struct Drift {
    tokens: f64,
    /// Largest |Δ log-prob| over tokens with equal expert choices.
    max: f64,
    /// Sum of e^|Δ| − 1 over all tokens.
    exp: f64,
    other_bits: f64,
    other_routes: f64,
}

impl Drift {
    fn compare(&mut self, micro: &Micro, logprob: &[f32], routes: &[Vec<u32>], config: &ModelConfig) {
        let k = config.experts_per_token;
        for (term, (&ours, &theirs)) in logprob.iter().zip(&micro.columns.behaviour).enumerate() {
            let row = micro.batch.row(term);
            let here = routes.iter().flat_map(|layer| &layer[row * k..(row + 1) * k]);
            let same = here.eq(micro.columns.routes[term]);
            let delta = f64::from((ours - theirs).abs());
            self.tokens += 1.0;
            self.exp += delta.exp_m1();
            self.other_bits += f64::from(u8::from(ours.to_bits() != theirs.to_bits()));
            if same {
                self.max = self.max.max(delta);
            } else {
                self.other_routes += 1.0;
            }
        }
    }

    /// None at all where no token was looked at: absence must not read as agreement.
    fn metrics(&self) -> Metrics {
        if self.tokens == 0.0 {
            return Vec::new();
        }
        vec![
            ("rollout/logprob_diff_max", self.max),
            ("rollout/logprob_exp_diff_mean", self.exp / self.tokens),
            ("rollout/bit_diff_share", self.other_bits / self.tokens),
            ("rollout/route_diff_share", self.other_routes / self.tokens),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        data::Merge,
        loss::Algorithm,
        recipe::{OptimizerSpec, Schedule},
        toy::{self, Letters},
    };
    use std::collections::BTreeMap;

    const COPIES: Letters = Letters(|problem, text| f64::from(u8::from(text == problem.answer)));
    const ALWAYS: Letters = Letters(|_, _| 1.0);
    const STARTS_WITH_B: Letters = Letters(|_, text| f64::from(u8::from(text.starts_with('b'))));

    fn spec() -> Rl {
        Rl { prompts: 8, group: 6, max_tokens: 5, ..Rl::default() }
    }

    fn flat() -> OptimizerSpec {
        OptimizerSpec { lr: 1e-2, warmup: 0, schedule: Schedule::Constant, ..OptimizerSpec::default() }
    }

    fn steps(
        spec: &Rl,
        task: &dyn Task,
        learner: &mut Learner,
        numbers: std::ops::Range<u64>,
    ) -> Vec<BTreeMap<&'static str, f64>> {
        let tokenizer = toy::tokenizer();
        let source = Source { task, tokenizer: &tokenizer, seed: 3, stage: 0 };
        numbers.map(|n| step(spec, source, n, 1e-2, 0.0, learner).unwrap().1.into_iter().collect()).collect()
    }

    #[test]
    fn reward_rises_under_every_loss() {
        for algorithm in [Algorithm::Cispo, Algorithm::Grpo, Algorithm::Gspo] {
            let spec = Rl { algorithm, ..spec() };
            let metrics = toy::pooled(|| steps(&spec, &STARTS_WITH_B, &mut toy::learner(2, flat()), 0..40));
            let mean = |of: &[BTreeMap<_, f64>]| of.iter().map(|m| m["rl/reward"]).sum::<f64>() / of.len() as f64;
            let (before, after) = (mean(&metrics[..3]), mean(&metrics[37..]));
            assert!(before < 0.5 && after > 0.9, "{algorithm:?}: {before} to {after}");
        }
    }

    #[test]
    fn the_first_look_is_the_samplers_at_any_temperature() {
        for temperature in [0.7, 1.0, 1.3] {
            let spec = Rl { temperature, dynamic_sampling: false, ..spec() };
            let metrics = toy::pooled(|| steps(&spec, &COPIES, &mut toy::learner(4, flat()), 0..4));
            for m in metrics {
                assert_eq!((m["rollout/bit_diff_share"], m["rollout/route_diff_share"]), (0.0, 0.0), "{m:?}");
                assert_eq!((m["rollout/logprob_diff_max"], m["rl/ratio_max"], m["rl/kl"]), (0.0, 1.0, 0.0));
            }
        }
    }

    #[test]
    fn merged_prefixes_agree_to_rounding() {
        let spec = Rl { merge: Merge::Prefix, dynamic_sampling: false, ..spec() };
        let metrics = toy::pooled(|| steps(&spec, &COPIES, &mut toy::learner(4, flat()), 0..4));
        assert!(metrics.iter().all(|m| m["rollout/logprob_diff_max"] < 1e-5));
    }

    #[test]
    fn later_passes_are_off_policy() {
        let spec = Rl { epochs: 2, minibatches: 3, dynamic_sampling: false, ..spec() };
        let mut learner = toy::learner(0, flat());
        let metrics = toy::pooled(|| steps(&spec, &COPIES, &mut learner, 0..1));
        assert_eq!(learner.optimizer.updates, 6);
        assert!(metrics[0]["rl/ratio_max"] > 1.0 && metrics[0]["rl/kl"] > 0.0);
        assert_eq!(metrics[0]["rollout/logprob_diff_max"], 0.0);
    }

    #[test]
    fn equal_groups_are_dropped_whole_and_their_places_offered_again() {
        let mut learner = toy::learner(0, flat());
        let before = learner.decoder.weights.clone();
        let metrics = toy::pooled(|| steps(&spec(), &ALWAYS, &mut learner, 0..1));
        assert_eq!((metrics[0]["rl/groups"], metrics[0]["rl/zero_std_share"]), (0.0, 1.0));
        assert!(learner.decoder.weights == before && learner.optimizer.updates == 0);
        assert!(!metrics[0].contains_key("train/loss"));
        let once = learner.spent.tokens;
        let spec = Rl { resample: 2, ..spec() };
        toy::pooled(|| steps(&spec, &ALWAYS, &mut learner, 0..1));
        assert!(learner.spent.tokens - once > 2 * once, "three rounds of sampling are counted");
    }

    #[test]
    fn sampling_is_filtered_by_the_tasks_score_and_not_the_shaped_reward() {
        // Lengths differ, so the penalty tells rewards apart where the task's scores are equal.
        let spec = Rl { overlong: Overlong::Penalty, ..spec() };
        let metrics = toy::pooled(|| steps(&spec, &ALWAYS, &mut toy::learner(0, flat()), 0..1));
        assert_eq!(metrics[0]["rl/groups"], 0.0);
        assert_eq!([3, 4, 5].map(|n| penalty(&spec, n)), [0.0, 0.0, -1.0]);
        assert_eq!(penalty(&Rl { overlong: Overlong::Keep, ..spec }, 5), 0.0);
    }

    #[test]
    fn masked_completions_are_not_trained() {
        // One token is never enough to end: all are cut.
        let spec = Rl { overlong: Overlong::Mask, max_tokens: 1, dynamic_sampling: false, ..spec() };
        let mut learner = toy::learner(0, flat());
        let task = Letters(|_, text| f64::from(u8::from(text == "b")));
        let metrics = toy::pooled(|| steps(&spec, &task, &mut learner, 0..1));
        assert!(metrics[0]["rl/truncated_share"] > 0.5);
        assert!(metrics[0].get("train/loss").is_none_or(|loss| loss.is_finite()));
    }

    #[test]
    fn gradients_do_not_depend_on_merging_or_the_split_into_passes() {
        let gradient = |merge, micro_batch| {
            let spec = Rl { merge, micro_batch, dynamic_sampling: false, ..spec() };
            let mut learner = toy::learner(0, flat());
            toy::pooled(|| steps(&spec, &COPIES, &mut learner, 0..1));
            learner.optimizer.first
        };
        let whole = gradient(Merge::Equal, 4096);
        for (merge, micro) in [(Merge::Equal, 1), (Merge::Equal, 40), (Merge::Prefix, 4096), (Merge::Prefix, 40)] {
            let off = toy::distance(&gradient(merge, micro), &whole);
            assert!(off < 1e-5, "{merge:?} in passes of {micro}: {off}");
        }
    }

    #[test]
    fn a_passage_has_no_prompt_to_answer() {
        let tokenizer = toy::tokenizer();
        let problem =
            Problem { id: String::new(), prompt: String::new(), answer: "ab".into(), fields: Default::default() };
        assert_eq!(encode(&problem, &COPIES, &tokenizer).unwrap_err().class, Class::Usage);
    }
}
