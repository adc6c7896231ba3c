//! The loop on a small repository of its own: branches, whole campaigns, the review queue.

mod aborts;
mod campaign;
mod fake;
mod git;
mod replay;
mod review;
mod support;
