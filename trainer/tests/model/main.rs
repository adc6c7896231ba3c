//! The model as a whole: decoder, rollout and engine, through the crate's public interface.

mod common;
mod decoder;
mod engine;
mod rollout;
mod twin;
