//! `hone generate` and `hone logprobs`: a checkpoint, asked directly.

use super::threads;
use crate::{cli, output};
use hone_evals::model::{LanguageModel, Sampling};
use hone_runs::{Class, Failure, Result, failure::Context};
use hone_trainer::engine::Engine;
use serde::Deserialize;
use std::io::Read;

/// Samples completions of one prompt.
pub fn generate(args: &cli::Generate, json: bool) -> Result<()> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context(Class::Usage, || "Cannot read the prompt".into())?;
            text
        }
    };
    let engine = Engine::load(&args.model, threads(&args.compute))?;
    let sampling =
        Sampling { temperature: args.temperature, max_tokens: args.max_tokens, k: args.n, stop: args.stop.clone() };
    let samples = engine.complete(&[prompt], &sampling, args.seed)?.remove(0);
    output::either(json, &samples, || samples.iter().map(|s| s.text.as_str()).collect::<Vec<_>>().join("\n"))
}

/// A line of the file of tokens.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    tokens: Vec<u32>,
}

/// Prints, for each line of tokens, a line of log-probs.
pub fn logprobs(args: &cli::Logprobs) -> Result<()> {
    let name = args.tokens.display();
    let text = std::fs::read_to_string(&args.tokens).context(Class::Usage, || format!("Cannot read {name}"))?;
    let mut sequences = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line: Line = serde_json::from_str(line).map_err(|e| {
            Failure::new(Class::Usage, format!("Not a line of tokens: {e}."))
                .hint("each line is {\"tokens\": [1, 2, 3]}")
                .at(format!("{name}:{}", i + 1))
        })?;
        sequences.push(line.tokens);
    }
    let engine = Engine::load(&args.model, threads(&args.compute))?;
    engine.logprobs(&sequences, args.top)?.iter().try_for_each(output::json_line)
}
