//! Models, data, training stages, the rollout engine and checkpoints: everything between a recipe and a checkpoint.

pub mod config;
