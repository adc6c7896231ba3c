//! Goals, proposers, branches, the campaign, the judge and the review queue.

pub mod branch;
pub mod digest;
pub mod edit;
pub mod goal;
pub mod judge;
pub mod memory;
pub mod proposal;
pub mod rules;
pub mod scope;
pub mod search;
pub mod space;
pub mod workspace;
