//! Models, data, training stages, the rollout engine and checkpoints: everything between a recipe and a checkpoint.

pub mod advantage;
pub mod alarm;
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
pub mod optimizer;
pub mod recipe;
mod rl;
pub mod rollout;
mod sft;
pub mod tokenizer;
#[cfg(test)]
mod toy;
pub mod train;
mod weights;
