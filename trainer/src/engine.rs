//! A checkpoint ready to answer: decoder, tokenizer and worker pool behind the trait that evals see, and what `hone generate`
//! and `hone logprobs` print. Samples ids through `rollout`; here is the text around them.

use std::path::Path;

use hone_evals::model::{Completion, LanguageModel, Sampling, TextScore};
use hone_kernels::head::Scores;
pub use hone_kernels::instruction_set;
use hone_kernels::threads::Pool;
use hone_kernels::{Forest, Prediction};
use hone_runs::failure::Context;
use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::checkpoint;
use crate::decoder::{Decoder, Pass, Workspace};
use crate::rollout::{RolloutOptions, generate_keyed};
use crate::tokenizer::Tokenizer;

/// Rows scored at once, at most, unless one sequence alone is longer.
const SCORE_ROWS: usize = 8192;

/// A model that answers.
pub struct Engine {
    /// The model.
    pub decoder: Decoder,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The workers.
    pub pool: Pool,
    /// Hash of the model it was loaded from, if it was.
    pub model_hash: Option<String>,
    /// Hash of the checkpoint it was loaded from, the trainer's state included, if it was: what a run's result names.
    pub checkpoint_hash: Option<String>,
}

/// Log-probs of a token sequence: a line of `hone logprobs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogProbs {
    /// Natural log-prob of each token after the first, given all before it, at temperature 1.
    pub logprobs: Vec<f32>,
    /// Mean negative log-prob; None where there is none.
    pub loss: Option<f64>,
    /// In place of each token after the first, the most probable ones with their log-probs, where they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top: Option<Vec<Vec<(u32, f32)>>>,
}

impl Engine {
    /// Loads the checkpoint that `path` means (a checkpoint, or a run folder) onto `threads` workers (0: one a core).
    ///
    /// # Errors
    /// As [`checkpoint::find`] and [`checkpoint::load`]; Infrastructure, where the system gives no threads.
    pub fn load(path: &Path, threads: usize) -> Result<Self> {
        let loaded = checkpoint::load(&checkpoint::find(path)?, false)?;
        let pool = Pool::new(threads).context(Class::Infrastructure, || "Cannot start the worker threads".into())?;
        Ok(Self {
            decoder: loaded.decoder,
            tokenizer: loaded.tokenizer,
            pool,
            model_hash: Some(loaded.model_hash),
            checkpoint_hash: Some(loaded.hash),
        })
    }

    /// Log-probs of each of `sequences`, with the `top` most probable tokens in each place (0: none).
    ///
    /// # Errors
    /// Usage, where a sequence is empty or names an id past the vocabulary.
    pub fn logprobs(&self, sequences: &[Vec<u32>], top: usize) -> Result<Vec<LogProbs>> {
        for (i, sequence) in sequences.iter().enumerate() {
            let vocab = self.decoder.config.vocab_size;
            let refuse = |what: String| Err(Failure::new(Class::Usage, format!("Token sequence {} {what}.", i + 1)));
            if sequence.is_empty() {
                return refuse("is empty".into());
            }
            if let Some(id) = sequence.iter().find(|&&id| id as usize >= vocab) {
                return refuse(format!("has the id {id}; the vocabulary ends before {vocab}"));
            }
        }
        Ok(self.pool.run(|| {
            let (mut ws, mut scores, mut out) = (Workspace::default(), Scores::default(), Vec::new());
            let mut rest = sequences;
            while !rest.is_empty() {
                let mut rows = 0;
                let fits = |s: &&Vec<u32>| {
                    rows += s.len();
                    rows <= SCORE_ROWS
                };
                let (batch, after) = rest.split_at(rest.iter().take_while(fits).count().max(1));
                rest = after;
                self.score_batch(batch, top, &mut ws, &mut scores, &mut out);
            }
            out
        }))
    }

    fn score_batch(
        &self,
        batch: &[Vec<u32>],
        top: usize,
        ws: &mut Workspace,
        scores: &mut Scores,
        out: &mut Vec<LogProbs>,
    ) {
        // The last token of a sequence predicts nothing.
        let forest = Forest::from_sequences(batch.iter().map(|s| &s[..s.len() - 1]));
        let targets = batch.iter().flat_map(|s| &s[1..]);
        let predictions: Vec<Prediction> =
            targets.enumerate().map(|(row, &target)| Prediction { row: row as u32, target }).collect();
        if predictions.is_empty() {
            scores.logprob.clear();
        } else {
            self.decoder.forward(&forest, &Pass::default(), ws);
            self.decoder.score(&predictions, 1.0, top, ws, scores);
        }
        let mut rest = scores.logprob.as_slice();
        let mut lists = scores.top.chunks(top.clamp(1, self.decoder.config.vocab_size));
        for sequence in batch {
            let (logprobs, after) = rest.split_at(sequence.len() - 1);
            rest = after;
            let mean = logprobs.iter().map(|&p| f64::from(p)).sum::<f64>() / logprobs.len() as f64;
            out.push(LogProbs {
                logprobs: logprobs.to_vec(),
                loss: (!logprobs.is_empty()).then_some(-mean),
                top: (top > 0).then(|| lists.by_ref().take(logprobs.len()).map(<[_]>::to_vec).collect()),
            });
        }
    }
}

impl LanguageModel for Engine {
    fn complete(&self, prompts: &[String], sampling: &Sampling, seed: u64) -> Result<Vec<Vec<Completion>>> {
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            let message = format!("The temperature {} is not a number from 0 up.", sampling.temperature);
            return Err(Failure::new(Class::Usage, message).hint("0 is greedy; 1 samples as the model was trained."));
        }
        let end = self.tokenizer.end();
        let mut ids = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let tokens = self.tokenizer.encode(prompt)?;
            // An empty prompt is the start of a text: what follows an end.
            ids.push(if tokens.is_empty() { vec![end] } else { tokens });
        }
        // A stop string with a character that the vocabulary lacks can never be generated.
        let stop_sequences: Vec<Vec<u32>> =
            sampling.stop.iter().filter_map(|s| self.tokenizer.encode(s).ok()).filter(|s| !s.is_empty()).collect();
        let options = RolloutOptions {
            temperature: sampling.temperature,
            max_tokens: sampling.max_tokens,
            stop: vec![end],
            stop_sequences,
            n: sampling.k,
            seed,
            ..RolloutOptions::default()
        };
        // Draws follow the prompt's text, so that they do not depend on its company.
        let key = |prompt: &String| {
            let mut first = [0; 8];
            first.copy_from_slice(&Sha256::digest(prompt)[..8]);
            u64::from_le_bytes(first)
        };
        let keys: Vec<u64> = prompts.iter().map(key).collect();
        let samples = self.pool.run(|| generate_keyed(&self.decoder, &ids, &keys, &options));
        let completion = |sample: crate::rollout::Sample| {
            let mut text = sample.tokens.as_slice();
            if let Some(stop) = options.stop_sequences.iter().filter(|s| text.ends_with(s)).max_by_key(|s| s.len()) {
                text = &text[..text.len() - stop.len()];
            }
            Completion { text: self.tokenizer.decode(text), tokens: sample.tokens.len(), finish: sample.finish }
        };
        Ok(samples.into_iter().map(|group| group.into_iter().map(completion).collect()).collect())
    }

    fn score(&self, texts: &[String]) -> Result<Vec<TextScore>> {
        let mut scores = vec![TextScore { logprob: 0.0, tokens: 0, bytes: 0 }; texts.len()];
        let (mut sequences, mut places) = (Vec::new(), Vec::new());
        for (place, text) in texts.iter().enumerate() {
            let tokens = self.tokenizer.encode(text)?;
            if !tokens.is_empty() {
                sequences.push(tokens);
                places.push(place);
            }
        }
        for ((place, tokens), scored) in places.into_iter().zip(&sequences).zip(self.logprobs(&sequences, 0)?) {
            scores[place] = TextScore {
                logprob: scored.logprobs.iter().map(|&p| f64::from(p)).sum(),
                tokens: scored.logprobs.len(),
                bytes: tokens[1..].iter().map(|&id| self.tokenizer.bytes_of(id)).sum(),
            };
        }
        Ok(scores)
    }

    fn identity(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut identity = serde_json::Map::new();
        identity.insert("model".into(), self.model_hash.clone().into());
        identity.insert("checkpoint".into(), self.checkpoint_hash.clone().into());
        identity.insert("engine".into(), concat!("hone-trainer ", env!("CARGO_PKG_VERSION")).into());
        identity.insert("dtype".into(), self.decoder.config.dtype.here().into());
        identity.insert("device".into(), "cpu".into());
        // Bits are promised for one instruction set and one segmentation.
        let instructions = format!("{} {}", std::env::consts::ARCH, instruction_set());
        identity.insert("instructions".into(), instructions.into());
        identity.insert(
            "segmentation".into(),
            format!("prompt, completion; blocks of {}", self.decoder.config.block).into(),
        );
        identity
    }
}
