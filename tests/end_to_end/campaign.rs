//! Whole campaigns of the built binary, on a model that trains in about a second.

use crate::support::{SUITE, expect, hone, json, sft_recipe, stderr, write};
use hone_runs::ledger::{Fold, Ledger};
use rand::Rng;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
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

/// Branches of the campaign and where they point.
fn branches(folder: &Path) -> Vec<(String, String)> {
    let repository = git2::Repository::open(folder).expect("a repository");
    let references = repository.references_glob("refs/heads/hone/*").expect("references");
    references
        .map(|r| r.expect("a reference"))
        .map(|r| (r.name().expect("a name").to_owned(), r.target().expect("a target").to_string()))
        .collect()
}

#[test]
fn a_campaign_killed_at_20_random_moments_resumes_to_the_same_fold_and_branches() {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    workspace(&whole, GOAL);
    workspace(&broken, GOAL);
    let index = std::fs::read(broken.join(".git/index")).expect("an index");
    let head = std::fs::read(broken.join(".git/HEAD")).expect("a head");

    let begun = Instant::now();
    let shown = json(&expect(&mut campaign(&whole, &["run"]), 0));
    let length = begun.elapsed();
    assert_eq!(shown["rounds"].as_array().map(Vec::len), Some(2), "{shown}");

    let mut draw = hone_runs::draws(4, "kill a campaign", 0, 0);
    for kill in 0..20 {
        let args: &[&str] =
            if broken.join(".hone/ledger.db").exists() && !fold_is_empty(&broken) { &["resume"] } else { &["run"] };
        let mut child = campaign(&broken, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let share = f64::from(draw.next_u32()) / f64::from(u32::MAX);
        std::thread::sleep(Duration::from_secs_f64(length.as_secs_f64() * 0.15 * share));
        child.kill().expect("a signal");
        child.wait().expect("its end");
        let _ = kill;
    }
    expect(&mut campaign(&broken, &["resume"]), 0);
    let (whole_fold, broken_fold) = (fold(&whole), fold(&broken));
    assert_eq!(whole_fold.events, broken_fold.events);
    assert_eq!(whole_fold.hash, broken_fold.hash);
    assert_eq!(branches(&whole), branches(&broken));
    assert_eq!(std::fs::read(broken.join(".git/index")).expect("an index"), index, "the index was touched");
    assert_eq!(std::fs::read(broken.join(".git/HEAD")).expect("a head"), head, "HEAD was touched");
}

fn fold_is_empty(folder: &Path) -> bool {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let ledger = Ledger::open(&folder.join(".hone/ledger.db")).await.expect("a ledger");
        ledger.campaigns().await.expect("a list").is_empty()
    })
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
