//! `hone`: parse arguments, wire the crates together, print. No logic of its own.

mod cli;
mod commands;
mod output;
mod reference;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    commands::log(cli.verbose);
    match commands::run(&cli) {
        Ok(code) => code,
        Err(failure) => {
            output::failure(&failure, cli.json);
            ExitCode::from(failure.class.exit_code())
        }
    }
}
