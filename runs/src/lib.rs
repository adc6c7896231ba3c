//! Run folders, the ledger and the launchers; and the few words that every crate above shares: failures with their exit
//! codes, random draws, quantities, and the reading of the YAML that people write. Knows no model, no goal and no agent.

pub mod alarm;
mod cgroup;
pub mod clock;
pub mod config;
pub mod draw;
pub mod failure;
pub mod folder;
pub mod launcher;
pub mod ledger;
pub mod metrics;
mod misfit;
pub mod process;
pub mod quantity;
pub mod supervisor;
pub mod tensorboard;

pub use draw::draws;
pub use failure::{Class, Failure, Result};
pub use folder::RunFolder;
pub use launcher::{Launcher, LocalLauncher};
pub use ledger::Ledger;
pub use metrics::MetricsWriter;
pub use quantity::{Bytes, Count, Span};
