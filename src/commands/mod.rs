//! One file a command, or a family of them. Each wires crates together and prints; what it wires lies in the crates.

mod bench;
mod campaign;
mod doctor;
mod eval;
mod files;
mod init;
mod model;
mod plan;
mod quickstart;
mod review;
mod runs;
mod selftest;
mod train;

use crate::{
    cli::{Cli, Command, Compute, Device},
    output, reference,
};
use clap::CommandFactory;
use hone_evals::mask::Masker;
use hone_runs::{Class, Failure, Result, failure::Context};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs the command; its exit code where it has its own to say.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let json = cli.json;
    match &cli.command {
        Command::Quickstart(args) => quickstart::run(args, json),
        Command::Init(args) => init::run(args, json),
        Command::Doctor => doctor::run(json),
        Command::Validate { file } => files::validate(file, json),
        Command::Plan(args) => plan::run(args, json),
        Command::Schema { kind, markdown } => files::schema(*kind, *markdown),
        Command::Campaign(command) => campaign::run(command, json),
        Command::Review(command) => review::run(command, json),
        Command::Verify { campaign, workspace } => campaign::verify(campaign, workspace, json),
        Command::Replay { campaign, train, workspace } => campaign::replay(campaign, *train, workspace, json),
        Command::Train(args) => train::run(args, json),
        Command::Eval(args) => eval::run(args, json),
        Command::Generate(args) => model::generate(args, json),
        Command::Logprobs(args) => model::logprobs(args),
        Command::Bench(args) => bench::run(args, json),
        Command::Runs(command) => runs::run(command, json),
        Command::Selftest(args) => selftest::run(args, json),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "hone", &mut script);
            output::text(&String::from_utf8_lossy(&script));
            Ok(())
        }
        Command::Reference => {
            output::text(&reference::commands(&mut Cli::command()));
            Ok(())
        }
        Command::Supervise { spec } => return Ok(hone_runs::supervisor::main(spec)),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Sends tracing to stderr, secrets masked (libraries log what they send): warnings, or more with `-v`.
pub fn log(verbose: u8) {
    let level = match verbose {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    };
    let masker = Masker::from_environment::<&str>([]);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .without_time()
        .with_ansi(crate::output::colour())
        .with_writer(move || masker.writer(output::Stderr))
        .init();
}

/// The worker threads asked for.
fn threads(compute: &Compute) -> usize {
    match compute.device {
        Device::Cpu | Device::Auto => compute.threads,
    }
}

/// What a file's own paths are relative to: the folder named, else the nearest folder above `file` that holds a git repository or a
/// goal, else the file's own.
fn root_of(file: &Path, named: Option<&Path>) -> Result<PathBuf> {
    if let Some(root) = named {
        return Ok(root.to_owned());
    }
    let file = std::path::absolute(file).context(Class::Usage, || format!("Cannot find {}", file.display()))?;
    let folder = file.parent().unwrap_or(Path::new("/"));
    let root = folder.ancestors().find(|f| f.join(".git").exists() || f.join("goal.yaml").exists());
    Ok(root.unwrap_or(folder).to_owned())
}

/// `file` relative to `root`, with forward slashes, as suites and goals name files.
fn relative(file: &Path, root: &Path) -> Result<String> {
    let outside = |_| {
        Failure::new(Class::Usage, format!("{} lies outside the workspace {}.", file.display(), root.display()))
            .hint("give --workspace")
    };
    let absolute = |p: &Path| std::path::absolute(p).context(Class::Usage, || format!("Cannot find {}", p.display()));
    let (file_at, root_at) = (absolute(file)?, absolute(root)?);
    let path = file_at.strip_prefix(&root_at).map_err(outside)?;
    Ok(path.to_string_lossy().replace(std::path::MAIN_SEPARATOR, "/"))
}

/// A tokio runtime for what waits: the ledger, processes, endpoints.
fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context(Class::Infrastructure, || "Cannot start the asynchronous runtime".into())
}
