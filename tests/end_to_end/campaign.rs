//! Whole campaigns of the built binary, on a model that trains in about a second.

use crate::support::{SUITE, expect, hone, json, sft_recipe, stderr, write};
use hone_runs::ledger::{Fold, Ledger};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use wiremock::{Mock, MockServer, ResponseTemplate, matchers};

const GOAL: &str = "goal: add one-digit numbers\n\
    metric: {suite: evals/addition.yaml, name: addition/pass@1, min_effect: 0.05}\n\
    edit: [recipe/**]\nrun: {recipe: recipe/recipe.yaml}\nruns: {replicates: 2..3, timeout: 5m}\n\
    budget: {rounds: 2}\nreview: {keep: policy, when: better}\n";

/// A committed workspace with a recipe that takes a moment.
fn workspace(folder: &Path, goal: &str) {
    write(folder, "goal.yaml", goal);
    write(folder, "recipe/recipe.yaml", &sft_recipe(8_000));
    write(folder, "evals/addition.yaml", SUITE);
    write(folder, "mine.txt", "not committed, not Hone's\n");
    let repository = git2::Repository::init(folder).expect("a repository");
    let mut index = repository.index().expect("an index");
    for path in ["goal.yaml", "recipe/recipe.yaml", "evals/addition.yaml"] {
        index.add_path(Path::new(path)).expect("a file");
    }
    index.write().expect("an index");
    let tree = repository.find_tree(index.write_tree().expect("a tree")).expect("a tree");
    // The same commit in every copy, so that their ledgers can be compared.
    let me = git2::Signature::new("Me", "me@localhost", &git2::Time::new(1_700_000_000, 0)).expect("a signature");
    repository.commit(Some("HEAD"), &me, &me, "Start", &tree, &[]).expect("a commit");
}

fn campaign(folder: &Path, args: &[&str]) -> Command {
    let mut command = hone();
    command.current_dir(folder).args(["--json", "campaign"]).args(args);
    command
}

fn fold(folder: &Path) -> Fold {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let ledger = Ledger::open(&folder.join(".hone/ledger.db")).await.expect("a ledger");
        ledger.verify("c1").await.expect("a whole chain");
        ledger.canonical_fold("c1").await.expect("a fold")
    })
}

/// Whole campaigns are killed, paused, starved of disk and set in wrong clocks, and come to what an undisturbed one comes to.
#[test]
fn faults_change_nothing_of_a_campaign() {
    let outcomes = json(&expect(hone().args(["--json", "selftest", "--chaos", "--kills", "20"]), 0));
    let outcomes = outcomes.as_array().expect("a list");
    assert_eq!(outcomes.len(), 5, "{outcomes:?}");
    for outcome in outcomes {
        assert_eq!(outcome["differences"], json!([]), "{outcome}");
        assert!(outcome["skipped"].is_string() || outcome["faults"].as_u64() > Some(0), "{outcome}");
    }
    assert_eq!(outcomes[1]["faults"], 20, "{outcomes:?}");
}

/// A server that answers the n-th request with the n-th of `replies`, and with the last from then on.
async fn server(replies: Vec<Value>) -> MockServer {
    let server = MockServer::start().await;
    let last = replies.len() - 1;
    for (i, reply) in replies.into_iter().enumerate() {
        let body = json!({
            "id": "x", "object": "chat.completion", "created": 0, "model": "scripted",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        });
        let mock = Mock::given(matchers::path("/v1/chat/completions"))
            .respond_with(ResponseTemplate::new(200).set_body_json(body));
        let mock = if i < last { mock.up_to_n_times(1) } else { mock };
        mock.with_priority(i as u8 + 1).mount(&server).await;
    }
    server
}

fn llm_goal(url: &str, rounds: u32) -> String {
    GOAL.replace("rounds: 2", &format!("rounds: {rounds}"))
        + &format!("proposer: {{llm: {{model: scripted, base_url: \"{url}/v1\", timeout: 20s}}}}\n")
}

fn proposal(file: &str, key: &str, value: Value) -> Value {
    let proposal = json!({
        "title": format!("set {key}"), "hypothesis": "The loss still falls at the end, so a larger step should help.",
        "edits": [{"op": "set", "file": file, "key": key, "value": value}], "predicted_effect": 0.1,
    });
    Value::String(proposal.to_string())
}

#[test]
fn a_scripted_model_that_is_good_malformed_out_of_scope_and_chatty_is_handled() {
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let good = proposal("recipe/recipe.yaml", "optimizer.lr", json!(0.003));
    let outside = proposal("evals/addition.yaml", "tasks.0.data.n", json!(1));
    let prose = Value::String("I would suggest raising the learning rate a little.".into());
    let replies =
        vec![good, Value::String("{\"title\": \"half".into()), prose.clone(), outside.clone(), outside, prose];
    let server = runtime.block_on(server(replies));
    workspace(folder.path(), &llm_goal(&server.uri(), 3));
    let shown = json(&expect(&mut campaign(folder.path(), &["run"]), 0));
    let rounds = shown["rounds"].as_array().expect("rounds");
    assert_eq!(rounds.len(), 3, "{shown}");
    assert!(rounds[0]["verdict"].is_string(), "the good proposal was run: {shown}");
    for (round, row) in rounds.iter().enumerate().skip(1) {
        assert!(row["verdict"].is_null() && row["cost"]["runs"] == 0, "round {round} ran: {shown}");
        assert!(row["reason"].as_str().is_some_and(|r| !r.is_empty()), "round {round} has no reason: {shown}");
    }
    assert!(shown["cost"]["model_tokens"].as_u64() >= Some(120), "{shown}");
    let suite = std::fs::read_to_string(folder.path().join("evals/addition.yaml")).expect("a suite");
    assert_eq!(suite, SUITE);
}

#[test]
fn a_scripted_campaign_is_replayed_when_its_endpoint_is_gone() {
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let good = proposal("recipe/recipe.yaml", "optimizer.lr", json!(0.003));
    let prose = Value::String("I would suggest raising the learning rate a little.".into());
    let server = runtime.block_on(server(vec![good.clone(), prose, good]));
    workspace(folder.path(), &llm_goal(&server.uri(), 2));
    expect(&mut campaign(folder.path(), &["run"]), 0);
    drop(server);
    let recorded = fold(folder.path());
    let replay = |more: &[&str], code| {
        let mut command = hone();
        command.current_dir(folder.path()).args(["--json", "replay", "c1"]).args(more);
        expect(&mut command, code)
    };
    for (more, trained) in [(&[][..], false), (&["--train"][..], true)] {
        let found = json(&replay(more, 0));
        assert_eq!((&found["hash"], &found["trained"]), (&json!(recorded.hash), &json!(trained)), "{found}");
        assert_eq!((&found["rounds"], &found["requests"], &found["complete"]), (&json!(2), &json!(3), &json!(true)));
        assert_eq!(found["events"], json!(recorded.events.len()), "{found}");
    }
    assert_eq!(fold(folder.path()), recorded);

    // A reply that was changed since is found out.
    let calls = folder.path().join(".hone/calls/c1.jsonl");
    let text = std::fs::read_to_string(&calls).expect("a record");
    std::fs::write(&calls, text.replace(": 0.003", ": 0.004").replace(":0.003", ":0.004")).expect("a record");
    let said = stderr(&replay(&[], 4));
    assert!(said.contains("round 1") && said.contains("propose") && said.contains("0.004"), "{said}");
}

#[test]
fn a_call_that_the_budget_does_not_hold_ends_the_campaign() {
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = runtime.block_on(server(vec![Value::String("unused".into())]));
    let goal = llm_goal(&server.uri(), 3).replace("rounds: 3", "rounds: 3, tokens: 10");
    workspace(folder.path(), &goal);
    let shown = json(&expect(&mut campaign(folder.path(), &["run"]), 3));
    assert_eq!((&shown["state"], &shown["reason"]), (&json!("over"), &json!("tokens")), "{shown}");
    assert_eq!(shown["rounds"].as_array().map(Vec::len), Some(1), "{shown}");
    assert!(shown["rounds"][0]["reason"].as_str().is_some_and(|r| r.contains("budget of tokens")), "{shown}");
    assert_eq!(runtime.block_on(server.received_requests()).map(|all| all.len()), Some(0), "nothing was asked");
    // There is nothing to go on with, and the same is said again.
    assert_eq!(json(&expect(&mut campaign(folder.path(), &["resume"]), 3))["reason"], "tokens");
}

#[test]
fn what_a_model_writes_does_not_drive_the_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hostile = "It\u{1b}[2J\u{1b}[1;1Hfalls.\u{1b}]0;owned\u{7}\r\u{9b}31m\n 0:00  kept";
    let reply = json!({
        "title": format!("raise\u{1b}[8m the rate {hostile}"), "hypothesis": hostile, "predicted_effect": 0.1,
        "edits": [
            {"op": "set", "file": "recipe/recipe.yaml", "key": "optimizer.lr", "value": 0.003},
            {"op": "write", "file": "recipe/notes.md", "content": format!("# {hostile}\n")},
        ],
    });
    let server = runtime.block_on(server(vec![Value::String(reply.to_string())]));
    workspace(folder.path(), &llm_goal(&server.uri(), 1));
    let show = |args: &[&str]| {
        let output = expect(hone().current_dir(folder.path()).args(args), 0);
        let all = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8")).concat();
        let drives = |c: char| c.is_control() && c != '\n' && c != '\t';
        assert!(!all.contains(drives), "{args:?}: {all:?}");
        all
    };
    let said = show(&["campaign", "run"]);
    assert!(said.contains("falls."), "{said}");
    assert!(!said.lines().any(|line| line.starts_with(" 0:00  kept")), "a line of ours was forged: {said}");
    let shown = show(&["review", "show", "c1/r001"]);
    assert!(shown.contains("+# It") && shown.contains("falls."), "{shown}");
    show(&["campaign", "status"]);
    show(&["review", "list", "--all"]);
    let json = show(&["--json", "review", "show", "c1/r001"]);
    let detail: Value = serde_json::from_str(&json).expect("JSON");
    assert!(detail["diff"].as_str().is_some_and(|diff| diff.contains("\u{1b}[2J")), "JSON keeps what is there: {json}");
}

/// Its terminal is closed: a hangup comes, and neither stream can be written to.
#[test]
fn a_campaign_outlives_its_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    workspace(folder.path(), GOAL);
    let mut command = hone();
    command.current_dir(folder.path()).args(["campaign", "run"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut errors = std::io::BufReader::new(child.stderr.take().expect("a pipe"));
    let mut first = String::new();
    // It speaks a moment before it listens for signals; by its second line it does.
    for _ in 0..2 {
        std::io::BufRead::read_line(&mut errors, &mut first).expect("a line");
    }
    drop((errors, child.stdout.take()));
    let id = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGHUP).expect("a signal");
    assert_eq!(child.wait().expect("its end").code(), Some(0), "{first}");
    let shown = json(&expect(&mut campaign(folder.path(), &["status"]), 0));
    assert_eq!((&shown["state"], &shown["reason"]), (&json!("over"), &json!("rounds")), "{shown}");
    assert_eq!(shown["rounds"].as_array().map(Vec::len), Some(2), "{shown}");
}

#[test]
fn an_unreachable_endpoint_pauses_the_campaign_and_costs_no_round() {
    let folder = tempfile::tempdir().expect("a folder");
    // A port that was free a moment ago: nobody listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
    workspace(folder.path(), &llm_goal(&format!("http://127.0.0.1:{port}"), 2));
    let said = stderr(&expect(&mut campaign(folder.path(), &["run"]), 6));
    assert!(said.contains("hint"), "{said}");
    let shown = json(&expect(&mut campaign(folder.path(), &["status"]), 0));
    assert_eq!(shown["state"], "paused", "{shown}");
    let spent = shown["rounds"].as_array().map_or(0, |r| r.iter().filter(|r| !r["verdict"].is_null()).count());
    assert_eq!(spent, 0, "{shown}");
}
