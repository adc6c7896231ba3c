//! The proposers, from an observation to a proposal.

mod fixture;
mod llm;
mod search;
