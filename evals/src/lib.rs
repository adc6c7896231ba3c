//! Tasks, suites, scorers, statistics, fingerprints, and the metered client of remote models. Sees a model only through
//! [`model::LanguageModel`]; names no model's insides.

pub mod evaluate;
pub mod fingerprint;
pub mod mask;
pub mod meter;
pub mod model;
pub mod remote;
pub mod scorer;
mod split;
pub mod stats;
pub mod suite;
pub mod task;
