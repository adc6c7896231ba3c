//! Goals, proposers, branches, the campaign, the judge and the review queue.

pub mod admit;
pub mod branch;
pub mod calls;
pub mod campaign;
pub mod chaos;
pub mod digest;
pub mod edit;
pub mod goal;
pub mod history;
pub mod judge;
pub mod llm;
pub mod memory;
mod observe;
pub mod progress;
pub mod prompt;
pub mod proposal;
pub mod record;
pub mod replay;
pub mod review;
mod round;
pub mod rules;
mod run;
pub mod scope;
pub mod search;
pub mod space;
pub mod status;
pub mod workspace;
