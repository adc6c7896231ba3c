//! Models, data, training stages, the rollout engine and checkpoints: everything between a recipe and a checkpoint.

pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod engine;
mod hugging_face;
mod layer;
pub mod rollout;
pub mod tokenizer;
mod weights;
