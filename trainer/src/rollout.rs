//! The rollout engine: batched sampling through the same layers, with a KV cache and lightning states. Records behaviour log-probs.

use crate::decoder::Decoder;
use hone_evals::model::Finish;

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
    /// Behaviour log-prob of each, at the sampling temperature.
    pub logprobs: Vec<f32>,
    /// Expert ids `[layers · k]` of the row that predicted each token; empty ones where the feed-forward is dense.
    pub routes: Vec<Vec<u32>>,
    /// Why it ended.
    pub finish: Finish,
}

/// Samples `options.n` completions of each prompt (token ids, none empty). Equal (seed, prompt index, sample index) give equal
/// samples, whatever the company. Call inside a pool.
pub fn generate(decoder: &Decoder, prompts: &[Vec<u32>], options: &RolloutOptions) -> Vec<Vec<Sample>> {
    let keys: Vec<u64> = (0..prompts.len() as u64).collect();
    generate_keyed(decoder, prompts, &keys, options)
}

/// [`generate`] with a key a prompt in place of its index: for callers whose draws follow the prompt wherever it stands.
pub fn generate_keyed(
    _decoder: &Decoder,
    _prompts: &[Vec<u32>],
    _keys: &[u64],
    _options: &RolloutOptions,
) -> Vec<Vec<Sample>> {
    todo!()
}
