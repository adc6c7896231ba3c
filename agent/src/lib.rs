//! Goals, proposers, branches, the campaign, the judge and the review queue.

pub mod digest;
pub mod edit;
pub mod judge;
pub mod proposal;
pub mod space;
