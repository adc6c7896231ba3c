//! Any bytes as a forest; see [`any_forest::check`].
#![no_main]

#[path = "../any_forest.rs"]
mod any_forest;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| any_forest::check(bytes));
