//! The launcher and its supervisor, as real processes: limits on whole trees, terminal records, relaunching, slots.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hone_runs::launcher::{Launcher, Limit, Limits, LocalLauncher, Outcome, RunSpec, Slots, Status};
use hone_runs::{Bytes, Class, RunFolder, Span, folder};
use tempfile::TempDir;

const SUPERVISE: &str = env!("CARGO_BIN_EXE_hone-supervise");

fn launcher(cores: usize) -> LocalLauncher {
    LocalLauncher::new(vec![SUPERVISE.into()], Slots { cores, gpus: vec!["0".into(), "GPU-b".into()] })
}

/// A run of `script` in `dir/run`, whose records go there and whose working directory is `dir`.
fn spec(dir: &TempDir, script: &str) -> RunSpec {
    RunSpec {
        folder: dir.path().join("run"),
        argv: vec!["sh".into(), "-c".into(), script.into()],
        cwd: dir.path().to_path_buf(),
        env: [("OWN".to_string(), "own value".to_string())].into(),
        limits: Limits { wall: Some(Span::seconds(60)), ..Limits::default() },
        cores: 1,
        gpus: 0,
    }
}

async fn launch(spec: RunSpec) -> Outcome {
    launcher(2).launch(spec).await.unwrap()
}

/// Waits for a file with a whole line and returns its first.
fn line(path: &Path) -> String {
    let started = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Some((line, _)) = text.split_once('\n') {
            return line.to_string();
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

fn kill(pid: u32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_finished_run_is_recorded_and_never_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(&dir, "echo started >> count; echo out; echo err >&2; exit 0");
    let outcome = launch(spec.clone()).await;
    assert_eq!((outcome.status, outcome.attempt, outcome.failure.clone()), (Status::Finished, 1, None));
    assert!(outcome.peak_rss > 100_000 && outcome.wall_s > 0.0, "{outcome:?}");
    let folder = RunFolder::open(&spec.folder).unwrap();
    assert_eq!(std::fs::read_to_string(folder.stdout()).unwrap(), "out\n");
    assert_eq!(std::fs::read_to_string(folder.stderr()).unwrap(), "err\n");

    assert_eq!(launch(spec.clone()).await, outcome);
    assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "started\n");
    folder.reopen().unwrap();
    assert_eq!(launch(spec).await.attempt, 2);
    assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "started\nstarted\n");
}

#[tokio::test]
async fn exit_codes_say_whose_failure_it_was() {
    for (end, status, class) in [
        ("exit 1", Status::Failed(1), Class::Candidate),
        ("exit 5", Status::Failed(5), Class::Candidate),
        ("exit 6", Status::Failed(6), Class::Infrastructure),
        ("exit 3", Status::Failed(3), Class::Budget),
        ("kill -SEGV $$", Status::Signal(11), Class::Candidate),
        ("kill -KILL $$", Status::Signal(9), Class::Infrastructure),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let outcome = launch(spec(&dir, &format!("echo The loss is NaN. >&2; {end}"))).await;
        let failure = outcome.failure.unwrap();
        assert_eq!((outcome.status, failure.class), (status, class), "{end}");
        assert!(failure.message.ends_with("It said last:\n> The loss is NaN."), "{failure}");
    }
    let dir = tempfile::tempdir().unwrap();
    let outcome = launch(RunSpec { argv: vec!["/no/such/program".into()], ..spec(&dir, "") }).await;
    assert_eq!((outcome.status, outcome.failure.unwrap().class), (Status::Failed(127), Class::Candidate));
}

#[test]
fn a_run_sees_an_allowed_environment_alone() {
    let dir = tempfile::tempdir().unwrap();
    let launched = foreign(&dir, &spec(&dir, "env > seen")).env("SOME_API_KEY", "secret").env("LANG", "C").status();
    assert!(launched.unwrap().success());
    let seen = std::fs::read_to_string(dir.path().join("seen")).unwrap();
    assert!(!seen.contains("secret"), "{seen}");
    for expected in ["OWN=own value\n", "CUDA_VISIBLE_DEVICES=\n", "LANG=C\n", "OMP_NUM_THREADS=1\n", "PATH="] {
        assert!(seen.contains(expected), "{expected} {seen}");
    }
}

#[tokio::test]
async fn arguments_arrive_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let mean =
        ["$(touch hacked)", "`touch hacked`", "; touch hacked", "a b\n'\"\\", "$HOME", "*", "--", "", "é\u{1b}[1m"];
    let mut argv: Vec<String> = ["sh", "-c", "printf '%s\\0' \"$@\" > seen", "name"].map(String::from).into();
    argv.extend(mean.map(String::from));
    let outcome = launch(RunSpec { argv, ..spec(&dir, "") }).await;
    assert_eq!(outcome.status, Status::Finished);
    let seen = std::fs::read_to_string(dir.path().join("seen")).unwrap();
    assert_eq!(seen, mean.map(|argument| format!("{argument}\0")).concat());
    assert!(!dir.path().join("hacked").exists());
    // Neither do the names of folders reach a shell.
    let cwd = dir.path().join("$(touch hacked) `touch hacked`");
    std::fs::create_dir(&cwd).unwrap();
    let folder = cwd.join("run; touch hacked");
    let outcome = launch(RunSpec { folder: folder.clone(), cwd: cwd.clone(), ..spec(&dir, "pwd") }).await;
    assert_eq!(outcome.status, Status::Finished);
    assert!(!cwd.join("hacked").exists() && !dir.path().join("hacked").exists());
    let said = std::fs::read_to_string(RunFolder::open(&folder).unwrap().stdout()).unwrap();
    assert_eq!(said.trim_end(), cwd.canonicalize().unwrap().to_str().unwrap());
}

#[test]
fn guards_leave_room_and_name_no_time() {
    let guards = Limits::guards();
    assert_eq!((guards.processes, guards.wall, guards.disk), (Some(512), None, None));
    if cfg!(target_os = "linux") {
        assert!(guards.memory.is_some_and(|memory| memory.0 > 100_000_000), "{guards:?}");
    }
}

#[tokio::test]
async fn a_timeout_ends_the_whole_tree_even_what_left_its_session() {
    let dir = tempfile::tempdir().unwrap();
    // Forked twice and in a session of its own, its parent dead: only a subreaper still finds it.
    let script = "(setsid sh -c 'echo $$ > daemon; exec sleep 1000' &) ; sleep 1000 & echo $! > child; wait";
    let limits = Limits { wall: Some(Span::seconds(1)), ..Limits::default() };
    let outcome = launch(RunSpec { limits, ..spec(&dir, script) }).await;
    assert_eq!(outcome.status, Status::Limit(Limit::Wall));
    let failure = outcome.failure.unwrap();
    assert_eq!(failure.class, Class::Budget);
    assert!(failure.message.starts_with("The run reached its limit of 1s of wall time"), "{failure}");
    for name in ["daemon", "child"] {
        assert!(!alive(&line(&dir.path().join(name))), "{name} lives");
    }
}

#[tokio::test]
async fn what_a_finished_run_leaves_in_the_background_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = launch(spec(&dir, "setsid sleep 1000 & echo $! > daemon")).await;
    assert_eq!(outcome.status, Status::Finished);
    assert!(!alive(&line(&dir.path().join("daemon"))));
}

#[tokio::test]
async fn memory_processes_and_disk_are_limited_over_the_tree() {
    let limits = Limits { wall: Some(Span::seconds(60)), ..Limits::default() };
    // Two hogs of 60 MB each: neither alone is over the limit. `tail` keeps a line without an end in memory.
    let hogs = "hog() { (head -c 60000000 /dev/zero; sleep 1000) | tail -n 1; }; hog & hog & wait";
    let crowd = "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; wait";
    let flood = "dd if=/dev/zero of=run/big bs=1000000 count=20 2>/dev/null; sleep 1000";
    for (script, limits, expected) in [
        (hogs, Limits { memory: Some(Bytes(100_000_000)), ..limits }, Limit::Memory),
        (crowd, Limits { processes: Some(6), ..limits }, Limit::Processes),
        (flood, Limits { disk: Some(Bytes(10_000_000)), ..limits }, Limit::Disk),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let outcome = launch(RunSpec { limits, ..spec(&dir, script) }).await;
        assert_eq!(outcome.status, Status::Limit(expected));
        assert_eq!(outcome.failure.as_ref().unwrap().class, Class::Budget);
        if expected == Limit::Memory {
            assert!(outcome.peak_rss > 100_000_000, "{outcome:?}");
        }
    }
}

/// A program that launches `spec` in a process of its own.
fn foreign(dir: &TempDir, spec: &RunSpec) -> Command {
    let path = dir.path().join("wanted.json");
    folder::write_json(&path, spec).unwrap();
    let mut command = Command::new(SUPERVISE);
    command.arg("launch").arg(path).stdout(Stdio::null());
    command
}

#[tokio::test]
async fn a_live_run_outlives_its_launcher_and_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(&dir, "echo started >> count; while [ ! -e go ]; do sleep 0.02; done; exit 5");
    let mut campaign = foreign(&dir, &spec).spawn().unwrap();
    line(&dir.path().join("count"));
    kill(campaign.id());
    campaign.wait().unwrap();

    let launcher = launcher(2);
    let (one, two, ()) = tokio::join!(launcher.launch(spec.clone()), launcher.launch(spec.clone()), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        std::fs::write(dir.path().join("go"), "").unwrap();
    });
    assert_eq!(one, two);
    assert_eq!(one.unwrap().status, Status::Failed(5));
    assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "started\n");
}

#[tokio::test]
async fn a_dead_run_is_started_again_after_its_remains_are_ended() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        "if mkdir first; then (setsid sh -c 'echo $$ > daemon; exec sleep 1000' &) ; echo $$ > child; sleep 1000; fi";
    let spec = spec(&dir, script);
    let launching = tokio::spawn({
        let spec = spec.clone();
        async move { launch(spec).await }
    });
    let seen: PathBuf = dir.path().into();
    let (child, daemon, supervisor) = tokio::task::spawn_blocking(move || {
        (line(&seen.join("child")), line(&seen.join("daemon")), line(&seen.join("run/lock")))
    })
    .await
    .unwrap();
    kill(supervisor.split(' ').next().unwrap().parse().unwrap());
    let outcome = launching.await.unwrap();
    assert_eq!((outcome.status, outcome.attempt), (Status::Finished, 2));
    assert!(!alive(&child) && !alive(&daemon));
}

#[tokio::test]
async fn a_supervisor_that_cannot_work_is_lost_not_the_candidates_fault() {
    let dir = tempfile::tempdir().unwrap();
    let launcher =
        LocalLauncher::new(vec!["sh".into(), "-c".into(), "echo no luck >&2; exit 1".into()], Slots::all_cores());
    let outcome = launcher.launch(spec(&dir, "true")).await.unwrap();
    let failure = outcome.failure.unwrap();
    assert_eq!((outcome.status, outcome.attempt, failure.class), (Status::Lost, 2, Class::Infrastructure));
    assert!(failure.message.contains("> no luck"), "{failure}");
    assert_eq!(launch(spec(&dir, "true")).await.status, Status::Finished);
}

#[tokio::test]
async fn a_stopped_run_saves_its_state_and_can_be_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        "test -e saved && exit 0; trap 'echo > saved; exit 143' TERM; echo > ready; while :; do sleep 0.02; done";
    let spec = spec(&dir, script);
    let launcher = launcher(1);
    let ready = dir.path().join("ready");
    let (outcome, stopped) = tokio::join!(launcher.launch(spec.clone()), async {
        tokio::task::spawn_blocking(move || line(&ready)).await.unwrap();
        launcher.stop(&spec.folder).await.unwrap()
    });
    let outcome = outcome.unwrap();
    assert!(stopped);
    assert_eq!((outcome.status, outcome.failure.unwrap().class), (Status::Stopped, Class::Terminated));
    assert!(!launcher.stop(&spec.folder).await.unwrap());
    let resumed = launcher.launch(spec).await.unwrap();
    assert_eq!((resumed.status, resumed.attempt), (Status::Finished, 2));
}

#[tokio::test]
async fn runs_go_side_by_side_as_far_as_slots_go() {
    // Two that wait for each other end only side by side.
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let meet = |own: &TempDir, other: &TempDir| {
        spec(own, &format!("echo > here; while [ ! -e {}/here ]; do sleep 0.02; done", other.path().display()))
    };
    let wide = launcher(2);
    let (left, right) = tokio::join!(wide.launch(meet(&one, &two)), wide.launch(meet(&two, &one)));
    assert_eq!((left.unwrap().status, right.unwrap().status), (Status::Finished, Status::Finished));

    // Three that refuse company end well only one after the other. One asks for more cores than there are.
    let shared = tempfile::tempdir().unwrap();
    let alone = |cores: usize| {
        let dir = tempfile::tempdir().unwrap();
        let script = format!("mkdir {0}/in || exit 1; sleep 0.1; rmdir {0}/in", shared.path().display());
        (RunSpec { cores, ..spec(&dir, &script) }, dir)
    };
    let runs = [alone(1), alone(1), alone(64)];
    let narrow = launcher(1);
    let (a, b, c) = tokio::join!(
        narrow.launch(runs[0].0.clone()),
        narrow.launch(runs[1].0.clone()),
        narrow.launch(runs[2].0.clone())
    );
    for outcome in [a, b, c] {
        assert_eq!(outcome.unwrap().status, Status::Finished);
    }
}

#[tokio::test]
async fn gpus_are_handed_out_once_each() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let meet = |own: usize| {
        let script = format!(
            "echo $CUDA_VISIBLE_DEVICES > gpu; while [ ! -e {}/gpu ]; do sleep 0.02; done",
            dirs[1 - own].path().display()
        );
        RunSpec { gpus: 1, ..spec(&dirs[own], &script) }
    };
    let launcher = launcher(2);
    let (one, two) = tokio::join!(launcher.launch(meet(0)), launcher.launch(meet(1)));
    assert_eq!((one.unwrap().status, two.unwrap().status), (Status::Finished, Status::Finished));
    let mut gpus = dirs.each_ref().map(|dir| line(&dir.path().join("gpu")));
    gpus.sort();
    assert_eq!(gpus, ["0", "GPU-b"]);
}

#[test]
fn a_supervisor_is_not_started_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    let order = dir.path().join("spec.json");
    let spec = spec(&dir, "echo > ran");
    folder::write_json(&order, &serde_json::json!({"spec": spec, "environment": {}, "attempt": 1})).unwrap();
    let output = Command::new(SUPERVISE).arg(&order).stdin(Stdio::null()).output().unwrap();
    // Class::Infrastructure: the folder has no lock yet; with one it is a usage failure. Either way nothing runs.
    assert!(!output.status.success());
    std::fs::write(spec.folder.join("lock"), "").unwrap();
    let output = Command::new(SUPERVISE).arg(&order).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("started by a launcher"));
    assert!(!dir.path().join("ran").exists());
}
