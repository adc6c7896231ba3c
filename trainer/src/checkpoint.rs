//! Checkpoints: a folder in Hugging Face's layout, written whole or not at all, hashed by content. What a trainer needs to go
//! on lies beside the model. Loading lists every tensor that does not fit.

use std::path::{Path, PathBuf};

use crate::decoder::{Decoder, Weights};
use crate::tokenizer::Tokenizer;
use hone_runs::Result;

/// What a trainer needs to go on: its own opaque state and AdamW's moments.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerState {
    /// Whatever the trainer keeps. Part of the hash.
    pub state: serde_json::Value,
    /// First moments, as the weights.
    pub m: Weights,
    /// Second moments, as the weights.
    pub v: Weights,
}

/// A loaded checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The model.
    pub decoder: Decoder,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Hash of its content, hex.
    pub hash: String,
    /// What the trainer saved, where it did and it was asked for.
    pub trainer: Option<TrainerState>,
}

/// Writes a checkpoint to `dir` (replacing one that is there) and returns its hash.
///
/// # Errors
/// Infrastructure, where files cannot be written.
pub fn save(
    _dir: &Path,
    _decoder: &Decoder,
    _tokenizer: &Tokenizer,
    _trainer: Option<(&serde_json::Value, &Weights, &Weights)>,
) -> Result<String> {
    todo!()
}

/// Loads the checkpoint in `dir`; with `trainer`, also what the trainer needs to go on.
///
/// # Errors
/// Usage, where `dir` holds no checkpoint that fits; Integrity, where its content is not what its hash says.
pub fn load(_dir: &Path, _trainer: bool) -> Result<Checkpoint> {
    todo!()
}

/// The newest whole `step-N` folder in `checkpoints`.
pub fn latest(_checkpoints: &Path) -> Option<PathBuf> {
    todo!()
}
