//! What a recipe will cost: a reckoning before anything is spent, not a measurement.

use super::{Recipe, Stage};
use crate::{checkpoint, weights::plan};
use hone_runs::Result;
use serde::Serialize;
use std::path::Path;

/// What a recipe will cost, before anything is spent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Weights of the model.
    pub params: u64,
    /// Rows through the model; None where only time is limited.
    pub tokens: Option<u64>,
    /// Floating-point operations; None where only time is limited.
    pub flops: Option<f64>,
}

/// What `recipe` will cost if its compute is spent to the end: each stage's part of the tokens at its own price a token, or as
/// many tokens as the operations buy. `root` is where the recipe's files are.
///
/// # Errors
/// Usage, where the recipe, its model, its tokenizer or a task cannot be used.
pub fn estimate(recipe: &Recipe, root: &Path) -> Result<Estimate> {
    recipe.check()?;
    let tasks = recipe.stages.iter().map(|s| s.task().build(root)).collect::<Result<Vec<_>>>()?;
    let config = match &recipe.model.from {
        Some(from) => checkpoint::load(&checkpoint::find(&root.join(from))?, false)?.decoder.config,
        None => recipe.model.resolve(recipe.tokenizer(root, &tasks, None)?.vocab_size())?,
    };
    let params = plan(&config).iter().map(|t| t.shape.iter().product::<usize>() as u64).sum();
    let shares: f64 = recipe.stages.iter().map(|s| s.common().share).sum();
    // Attention over the text is small change beside the weights in a model of this size: a row is taken to see 32.
    let (train, forward) = (config.train_flops(1, 32.0), config.forward_flops(1, 32.0));
    let price = |stage: &Stage| match stage {
        Stage::Sft(_) => train,
        // Every row is sampled once and trained once an epoch.
        Stage::Rl(s) => (forward + s.epochs as f64 * train) / (1.0 + s.epochs as f64),
    };
    let limits = recipe.compute.resolved();
    let by_tokens = |stage: &Stage| limits.tokens.map(|n| n.0 as f64 * stage.common().share / shares);
    let by_flops = |stage: &Stage| limits.flops.map(|n| n.0 as f64 * stage.common().share / shares / price(stage));
    let (mut tokens, mut flops) = (None, None);
    for stage in &recipe.stages {
        let limits = [by_tokens(stage), by_flops(stage)];
        if let Some(of_stage) = limits.into_iter().flatten().reduce(f64::min) {
            tokens = Some(tokens.unwrap_or(0.0) + of_stage);
            flops = Some(flops.unwrap_or(0.0) + of_stage * price(stage));
        }
    }
    Ok(Estimate { params, tokens: tokens.map(|n| n as u64), flops })
}
