//! The rollout engine: batched sampling through the same layers, with a KV cache and lightning states. Records behaviour
//! log-probs, equal bit for bit to those of `Decoder::forward` on the forest {prompt → completions}. Knows no text.

use std::collections::HashMap;
use std::sync::Arc;

use hone_evals::model::Finish;
use hone_kernels::{Forest, Tensor, lightning, softmax};
use hone_runs::draws;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::decoder::{Decoder, Keep, Workspace};
use crate::layer::{Mixing, OverForest};

/// Sequences decoded at once, at most: bounds memory, and past some hundreds of rows a step gains nothing from more.
pub(crate) const ACTIVE: usize = 256;
/// Prompt rows prefilled at once, at most, unless one prompt alone is longer.
pub(crate) const PREFILL_ROWS: usize = 8192;
/// A token this probable counts toward the repetition stop (MiniMax-M1, arXiv:2506.13585 §3.2).
const CERTAIN: f32 = 0.99;

/// How to sample ids.
#[derive(Clone, Debug)]
pub struct RolloutOptions {
    /// 0 is greedy (log-probs then at temperature 1).
    pub temperature: f32,
    /// At most this many new tokens.
    pub max_tokens: usize,
    /// Ids that end a completion (kept as its last token).
    pub stop: Vec<u32>,
    /// Id sequences that end a completion (kept as its last tokens): stop strings.
    pub stop_sequences: Vec<Vec<u32>>,
    /// Samples a prompt, sharing its cache.
    pub n: usize,
    /// Halt after this many consecutive tokens with p > 0.99 (MiniMax-M1: 3,000); None: never.
    pub repetition: Option<usize>,
    /// Key of the draws, with the prompt's index and the sample's.
    pub seed: u64,
}

impl Default for RolloutOptions {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            max_tokens: 64,
            stop: Vec::new(),
            stop_sequences: Vec::new(),
            n: 1,
            repetition: Some(3000),
            seed: 0,
        }
    }
}

/// One sampled completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// New tokens, the stop token included.
    pub tokens: Vec<u32>,
    /// Behaviour log-prob of each, at the sampling temperature (natural log; of the processed distribution, not the raw one).
    pub logprobs: Vec<f32>,
    /// Expert ids `[layers · k]` of the row that predicted each token; empty ones where the feed-forward is dense.
    pub routes: Vec<Vec<u32>>,
    /// Why it ended.
    pub finish: Finish,
}

/// Samples `options.n` completions of each prompt (token ids, none empty). Equal (seed, prompt index, sample index) give equal
/// samples, whatever the company. Call inside a pool. Panics on an empty prompt and on ids past the vocabulary.
pub fn generate(decoder: &Decoder, prompts: &[Vec<u32>], options: &RolloutOptions) -> Vec<Vec<Sample>> {
    let keys: Vec<u64> = (0..prompts.len() as u64).collect();
    generate_keyed(decoder, prompts, &keys, options)
}

/// [`generate`] with a key a prompt in place of its index: for callers whose draws follow the prompt wherever it stands.
pub fn generate_keyed(
    decoder: &Decoder,
    prompts: &[Vec<u32>],
    keys: &[u64],
    options: &RolloutOptions,
) -> Vec<Vec<Sample>> {
    assert_eq!(prompts.len(), keys.len(), "a key a prompt");
    let mut done: Vec<Vec<Option<Sample>>> = prompts.iter().map(|_| vec![None; options.n]).collect();
    // Prompt by prompt, so that the samples of one share a prefill.
    let mut waiting = (0..prompts.len()).flat_map(|p| (0..options.n).map(move |s| (p, s))).peekable();
    let mut batch = Batch::new(decoder, options);
    loop {
        // Half a batch must be free before others join: a prefill is worth its pass only for many rows.
        if waiting.peek().is_some() && batch.active.len() <= ACTIVE / 2 {
            let mut joining = Vec::new();
            let (mut rows, mut last) = (0, None);
            while let Some(&(p, s)) = waiting.peek() {
                let new = if last == Some(p) { 0 } else { prompts[p].len() };
                let full = batch.active.len() + joining.len() == ACTIVE || rows + new > PREFILL_ROWS;
                if full && !joining.is_empty() {
                    break;
                }
                (rows, last) = (rows + new, Some(p));
                joining.push((p, s));
                waiting.next();
            }
            batch.admit(&joining, prompts, keys);
        } else if !batch.active.is_empty() {
            batch.step();
        } else {
            break;
        }
        for finished in batch.active.extract_if(.., |s| s.finish.is_some()) {
            let (prompt, sample) = finished.place;
            done[prompt][sample] = Some(finished.into_sample());
        }
    }
    let taken = |s: Option<Sample>| s.expect("every sequence admitted has finished");
    done.into_iter().map(|samples| samples.into_iter().map(taken).collect()).collect()
}

/// What one layer remembers of the rows before.
#[derive(Clone, Debug)]
enum Cache {
    /// Keys and values, `[n, kv_heads · d]` each.
    Softmax { keys: Vec<f32>, values: Vec<f32> },
    /// The state, closed at a prompt's end.
    Lightning(lightning::State),
}

/// A completion in the making.
struct Sequence {
    /// (prompt, sample).
    place: (usize, usize),
    /// A cache a layer: the prompt's, shared by its samples. Lightning states are copied from it into `own` at once.
    shared: Arc<Vec<Cache>>,
    /// A cache a layer: the completion's.
    own: Vec<Cache>,
    prompt_len: usize,
    rng: ChaCha8Rng,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    routes: Vec<Vec<u32>>,
    /// Consecutive tokens with p > 0.99.
    certain: usize,
    finish: Option<Finish>,
}

impl Sequence {
    /// Draws the next token from the log-probs of the vocabulary, and sees whether it is the last.
    fn take(&mut self, distribution: &[f32], options: &RolloutOptions, routes: Vec<u32>) {
        let id = if options.temperature == 0.0 {
            greedy(distribution)
        } else {
            sample(distribution, self.rng.random::<f64>())
        };
        let logprob = distribution[id];
        self.tokens.push(id as u32);
        self.logprobs.push(logprob);
        self.routes.push(routes);
        self.certain = if logprob > CERTAIN.ln() { self.certain + 1 } else { 0 };
        self.finish = if options.stop.contains(&(id as u32))
            || options.stop_sequences.iter().any(|s| !s.is_empty() && self.tokens.ends_with(s))
        {
            Some(Finish::Stop)
        } else if options.repetition.is_some_and(|limit| self.certain >= limit) {
            Some(Finish::Repetition)
        } else {
            (self.tokens.len() >= options.max_tokens).then_some(Finish::Length)
        };
    }

    fn into_sample(self) -> Sample {
        let finish = self.finish.unwrap_or(Finish::Length);
        Sample { tokens: self.tokens, logprobs: self.logprobs, routes: self.routes, finish }
    }
}

/// The most probable id; of equals the lowest.
fn greedy(distribution: &[f32]) -> usize {
    let mut best = 0;
    for (id, &p) in distribution.iter().enumerate() {
        if p > distribution[best] {
            best = id;
        }
    }
    best
}

/// The id where the cumulative probability, in the order of ids, first passes `u` in [0, 1).
fn sample(distribution: &[f32], u: f64) -> usize {
    let (mut sum, mut last) = (0.0, 0);
    for (id, &logprob) in distribution.iter().enumerate() {
        let p = f64::from(logprob.exp());
        sum += p;
        if p > 0.0 {
            last = id; // rounding may leave the whole sum a little below 1
        }
        if sum > u {
            return id;
        }
    }
    last
}

/// The sequences being decoded, and the arrays they share.
struct Batch<'a> {
    decoder: &'a Decoder,
    options: &'a RolloutOptions,
    active: Vec<Sequence>,
    ws: Workspace,
    distributions: Tensor,
    tokens: Vec<u32>,
    positions: Vec<u32>,
}

impl<'a> Batch<'a> {
    fn new(decoder: &'a Decoder, options: &'a RolloutOptions) -> Self {
        let mut ws = Workspace::default();
        decoder.prepare_head(&mut ws);
        let (distributions, tokens, positions) = Default::default();
        Self { decoder, options, active: Vec::new(), ws, distributions, tokens, positions }
    }

    /// The temperature of log-probs.
    fn temperature(&self) -> f32 {
        if self.options.temperature == 0.0 { 1.0 } else { self.options.temperature }
    }

    /// Experts of `row` in the last pass, layer by layer.
    fn routes(&self, row: usize) -> Vec<u32> {
        let k = self.decoder.config.experts_per_token;
        self.ws.routes().iter().flat_map(|layer| &layer[row * k..(row + 1) * k]).copied().collect()
    }

    /// Prefills the prompts of `joining`, each different one once, and draws a first token for each sequence.
    fn admit(&mut self, joining: &[(usize, usize)], prompts: &[Vec<u32>], keys: &[u64]) {
        let mut unique: Vec<&[u32]> = Vec::new();
        let mut segment_of: HashMap<&[u32], usize> = HashMap::new();
        for &(p, _) in joining {
            assert!(!prompts[p].is_empty(), "prompt {p} is empty");
            segment_of.entry(&prompts[p]).or_insert_with(|| {
                unique.push(&prompts[p]);
                unique.len() - 1
            });
        }
        let forest = Forest::from_sequences(unique.iter().copied());
        let mut finals = Vec::new();
        let mut mixing = Prefill {
            over: OverForest { forest: &forest, finals: Some(&mut finals) },
            caches: unique.iter().map(|_| Vec::new()).collect(),
        };
        let (tokens, positions) = (forest.tokens(), forest.positions());
        self.decoder.run(tokens, positions, &mut mixing, Keep::Outputs, None, &mut self.ws);
        let caches: Vec<Arc<Vec<Cache>>> = mixing.caches.into_iter().map(Arc::new).collect();

        // The distributions after each prompt's last row alone.
        let mut last = Tensor::zeros(&[unique.len(), self.decoder.config.hidden_size]);
        for segment in 0..unique.len() {
            last.row_mut(segment).copy_from_slice(self.ws.hidden().row(forest.subtree_end(segment) - 1));
        }
        self.decoder.distributions(&last, self.temperature(), &self.ws, &mut self.distributions);
        for &(p, s) in joining {
            let segment = segment_of[prompts[p].as_slice()];
            let fresh = |cache: &Cache| match cache {
                Cache::Softmax { .. } => Cache::Softmax { keys: Vec::new(), values: Vec::new() },
                Cache::Lightning(state) => Cache::Lightning(state.clone()),
            };
            let mut sequence = Sequence {
                place: (p, s),
                shared: caches[segment].clone(),
                own: caches[segment].iter().map(fresh).collect(),
                prompt_len: prompts[p].len(),
                rng: draws(self.options.seed, "rollout", keys[p], s as u64),
                tokens: Vec::new(),
                logprobs: Vec::new(),
                routes: Vec::new(),
                certain: 0,
                finish: (self.options.max_tokens == 0).then_some(Finish::Length),
            };
            if sequence.finish.is_none() {
                let routes = self.routes(forest.subtree_end(segment) - 1);
                sequence.take(self.distributions.row(segment), self.options, routes);
            }
            self.active.push(sequence);
        }
    }

    /// Feeds each sequence its last token and draws the next.
    fn step(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        for s in &self.active {
            self.tokens.push(*s.tokens.last().expect("a first token was drawn at admission"));
            self.positions.push((s.prompt_len + s.tokens.len() - 1) as u32);
        }
        let mut mixing = OverCaches { sequences: &mut self.active };
        self.decoder.run(&self.tokens, &self.positions, &mut mixing, Keep::Outputs, None, &mut self.ws);
        self.decoder.distributions(self.ws.hidden(), self.temperature(), &self.ws, &mut self.distributions);
        for row in 0..self.active.len() {
            let routes = self.routes(row);
            self.active[row].take(self.distributions.row(row), self.options, routes);
        }
    }
}

/// A forest of prompts whose keys, values and states are kept, a list of caches a segment.
struct Prefill<'a> {
    over: OverForest<'a>,
    caches: Vec<Vec<Cache>>,
}

impl Mixing for Prefill<'_> {
    fn softmax(
        &mut self,
        layer: usize,
        heads: softmax::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
        lse: &mut Tensor,
    ) {
        self.over.softmax(layer, heads, q, k, v, out, lse);
        let width = k.cols();
        for (segment, caches) in self.caches.iter_mut().enumerate() {
            let rows = self.over.forest.rows_of(segment);
            let part = |t: &Tensor| t.data()[rows.start * width..rows.end * width].to_vec();
            caches.push(Cache::Softmax { keys: part(k), values: part(v) });
        }
    }

    fn lightning(
        &mut self,
        layer: usize,
        heads: &lightning::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
    ) {
        self.over.lightning(layer, heads, q, k, v, out);
        let finals = self.over.finals.as_deref().expect("a prefill asks for states");
        for (caches, kv) in self.caches.iter_mut().zip(finals) {
            caches.push(Cache::Lightning(lightning::State { kv: kv.clone(), ..lightning::State::empty(heads) }));
        }
    }
}

/// A row a sequence, each seeing its own cache and its prompt's.
struct OverCaches<'a> {
    sequences: &'a mut [Sequence],
}

/// Sequences a task: one row's attention is too little for one.
const SEQUENCES: usize = 4;

impl Mixing for OverCaches<'_> {
    fn softmax(
        &mut self,
        layer: usize,
        heads: softmax::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
        _lse: &mut Tensor,
    ) {
        out.resize(q.shape());
        let rows = out.data_mut().par_chunks_mut(q.cols()).with_min_len(SEQUENCES);
        self.sequences.par_iter_mut().zip(rows).enumerate().for_each(|(row, (sequence, out))| {
            let (Cache::Softmax { keys, values }, Cache::Softmax { keys: before, values: values_before }) =
                (&mut sequence.own[layer], &sequence.shared[layer])
            else {
                unreachable!("caches follow the layers' mixers")
            };
            keys.extend_from_slice(k.row(row));
            values.extend_from_slice(v.row(row));
            softmax::row(heads, q.row(row), &[(before, values_before), (keys, values)], out);
        });
    }

    fn lightning(
        &mut self,
        layer: usize,
        heads: &lightning::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
    ) {
        out.resize(q.shape());
        let rows = out.data_mut().par_chunks_mut(q.cols()).with_min_len(SEQUENCES);
        self.sequences.par_iter_mut().zip(rows).enumerate().for_each(|(row, (sequence, out))| {
            let Cache::Lightning(state) = &mut sequence.own[layer] else {
                unreachable!("caches follow the layers' mixers")
            };
            lightning::row(heads, q.row(row), k.row(row), v.row(row), state, out);
        });
    }
}
