//! End-to-end tests of the built binary: the wiring, and what only a whole process can show (kill -9, exit codes, signals).
//! What a crate can test in itself is tested there.

mod campaign;
mod command_line;
mod kill;
mod plan;
mod support;
