//! The loop on a small repository of its own: branches, whole campaigns, the review queue.

mod git;
mod support;
