//! Models, data, training stages, the rollout engine and checkpoints: everything between a recipe and a checkpoint.
//!
//! A recipe is trained with [`train::train`], and what it leaves answers through [`engine::Engine`]:
//!
//! ```
//! use hone_trainer::{engine::Engine, recipe::Recipe, train::{TrainOptions, train}};
//!
//! # fn main() -> hone_runs::Result<()> {
//! let recipe = Recipe::parse("
//! model: {preset: hybrid-nano}
//! compute: {tokens: 3k}
//! stages:
//!   - sft: {task: addition, digits: 1}
//!   - rl: {task: addition, digits: 1, prompts: 4, max_tokens: 4}
//! ", "recipe.yaml", &["stages.0.sft.lr=2e-3".into()])?;
//!
//! # let dir = tempfile::tempdir().unwrap();
//! # let out = dir.path().join("run");
//! // The folder gets checkpoints, metrics and a manifest. An observer (here none) would see every step.
//! let options = TrainOptions { out: out.clone(), seed: 1, threads: 1, ..TrainOptions::default() };
//! let outcome = train(&recipe, &options, &mut ())?;
//! assert!(outcome.tokens >= 3000);
//!
//! let engine = Engine::load(&out, 1)?;
//! assert_eq!(engine.logprobs(&[vec![49, 43, 50]], 0)?[0].logprobs.len(), 2);
//! # Ok(())
//! # }
//! ```

pub mod advantage;
pub mod alarm;
pub mod bench;
pub mod budget;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod decoder;
pub mod engine;
mod hugging_face;
mod layer;
mod learner;
pub mod loss;
pub mod memory;
pub mod optimizer;
pub mod plan;
pub mod recipe;
mod rl;
pub mod rollout;
mod sft;
pub mod tokenizer;
#[cfg(test)]
mod toy;
pub mod train;
mod weights;
