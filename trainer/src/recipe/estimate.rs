//! What a recipe will cost: a reckoning before anything is spent, not a measurement.

use super::{Recipe, Stage};
use crate::{checkpoint, config::ModelConfig, tokenizer::Tokenizer, weights::plan};
use hone_evals::task::Task;
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

/// What a recipe names, looked up: its tasks, tokenizer and model.
pub(crate) struct Named {
    pub tasks: Vec<Box<dyn Task>>,
    pub tokenizer: Tokenizer,
    pub config: ModelConfig,
}

impl Named {
    /// Looks up what `recipe` names; `root` is where its files are.
    ///
    /// # Errors
    /// Usage, where the recipe, its model, its tokenizer or a task cannot be used.
    pub fn of(recipe: &Recipe, root: &Path) -> Result<Self> {
        recipe.check()?;
        let tasks = recipe.stages.iter().map(|s| s.task().build(root)).collect::<Result<Vec<_>>>()?;
        let (config, tokenizer) = match &recipe.model.from {
            Some(from) => {
                let loaded = checkpoint::load(&checkpoint::find(&root.join(from))?, false)?;
                (loaded.decoder.config, recipe.tokenizer(root, &tasks, Some(&loaded.tokenizer))?)
            }
            None => {
                let tokenizer = recipe.tokenizer(root, &tasks, None)?;
                (recipe.model.resolve(tokenizer.vocab_size())?, tokenizer)
            }
        };
        Ok(Self { tasks, tokenizer, config })
    }
}

/// What a stage will spend: rows through the model, and floating-point operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spending {
    /// Rows through the model.
    pub tokens: f64,
    /// Floating-point operations.
    pub flops: f64,
}

/// What `recipe` will cost if its compute is spent to the end: each stage's part of the tokens at its own price a token, or as
/// many tokens as the operations buy. `root` is where the recipe's files are.
///
/// # Errors
/// Usage, where the recipe, its model, its tokenizer or a task cannot be used.
pub fn estimate(recipe: &Recipe, root: &Path) -> Result<Estimate> {
    let config = Named::of(recipe, root)?.config;
    let spending: Option<Vec<Spending>> = spending(recipe, &config).into_iter().collect();
    let sum = |of: fn(&Spending) -> f64| spending.as_ref().map(|stages| stages.iter().map(of).sum::<f64>());
    Ok(Estimate { params: params(&config), tokens: sum(|s| s.tokens).map(|n| n as u64), flops: sum(|s| s.flops) })
}

/// Weights of a model.
pub(crate) fn params(config: &ModelConfig) -> u64 {
    plan(config).iter().map(|t| t.shape.iter().product::<usize>() as u64).sum()
}

/// What each stage will spend; None where only time is limited.
pub(crate) fn spending(recipe: &Recipe, config: &ModelConfig) -> Vec<Option<Spending>> {
    let shares: f64 = recipe.stages.iter().map(|s| s.common().share).sum();
    // Attention over the text is small change beside the weights in a model of this size: a row is taken to see 32.
    let (train, forward) = (config.train_flops(1, 32.0), config.forward_flops(1, 32.0));
    let limits = recipe.compute.resolved();
    let of = |stage: &Stage| {
        let price = match stage {
            Stage::Sft(_) => train,
            // Every row is sampled once and trained once an epoch.
            Stage::Rl(s) => (forward + s.epochs as f64 * train) / (1.0 + s.epochs as f64),
        };
        let share = stage.common().share / shares;
        let by_tokens = limits.tokens.map(|n| n.0 as f64 * share);
        let by_flops = limits.flops.map(|n| n.0 as f64 * share / price);
        let tokens = [by_tokens, by_flops].into_iter().flatten().reduce(f64::min)?;
        Some(Spending { tokens, flops: tokens * price })
    };
    recipe.stages.iter().map(of).collect()
}
