//! The supervisor as a program of its own, for programs that embed the launcher without being `hone`:
//! `hone-supervise ORDER` supervises, `hone-supervise launch SPEC.json` launches a run spec and prints its outcome as JSON.

use std::path::Path;
use std::process::ExitCode;

use hone_runs::launcher::{Launcher, LocalLauncher, RunSpec, Slots};
use hone_runs::{Class, Failure, Result, folder, supervisor};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [order] => supervisor::main(Path::new(order)),
        ["launch", spec] => match launch(Path::new(spec)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                eprintln!("{failure}");
                ExitCode::from(failure.class.exit_code())
            }
        },
        _ => {
            eprintln!("usage: hone-supervise ORDER | hone-supervise launch SPEC.json");
            ExitCode::from(Class::Usage.exit_code())
        }
    }
}

fn launch(path: &Path) -> Result<()> {
    let spec: RunSpec = folder::read_json(path)?
        .ok_or_else(|| Failure::new(Class::Usage, format!("There is no run spec at {}.", path.display())))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(Class::Infrastructure, format!("Cannot start: {error}.")))?;
    let launcher = LocalLauncher::new(vec!["/proc/self/exe".into()], Slots::all_cores());
    let outcome = runtime.block_on(launcher.launch(spec))?;
    println!("{}", serde_json::to_string(&outcome).unwrap_or_default());
    Ok(())
}
