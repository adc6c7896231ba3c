//! Whole campaigns: what they decide, what they run, and what they do when something goes wrong.

use crate::support::{Acting, GOAL, Place, RECIPE, Script, Setting, proposal, set, usual_script};
use hone_agent::admit::Admitting;
use hone_agent::campaign::{self, Campaign, End, Options, Request};
use hone_agent::edit::Edit;
use hone_agent::history::History;
use hone_agent::judge::Verdict;
use hone_agent::progress::{Observer, Progress};
use hone_agent::proposal::{Proposal, Proposed, Proposer};
use hone_agent::record::{Admission, Ended, Reason, Started};
use hone_agent::review;
use hone_agent::status::{self, Overview, State};
use hone_evals::meter::{Budget, Meter, Spend};
use hone_evals::remote::{Client, Endpoint, Message};
use hone_runs::ledger::NewEvent;
use hone_runs::{Class, Failure, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

fn over(reason: &str) -> End {
    End::Over(Ended { reason: reason.into() })
}

fn person(goal: &str) -> String {
    goal.replace("review: {keep: policy, when: better}", "review: {keep: person}")
}

async fn verdicts(place: &Place) -> Vec<Option<Verdict>> {
    place.history().await.rounds.values().map(|r| r.ruling.as_ref().map(|r| r.verdict)).collect()
}

#[tokio::test]
async fn a_campaign_keeps_what_is_better_and_closes_on_it() {
    let place = Place::usual();
    let before = place.belongings();
    let setting = Setting::default();
    assert_eq!(setting.drive(&place, &usual_script()).await, Ok(over("rounds")));

    let history = place.history().await;
    assert_eq!(verdicts(&place).await, [Some(Verdict::Better), Some(Verdict::Worse), Some(Verdict::Better)]);
    assert_eq!(history.kept, [1, 3]);
    let branches = place.branches();
    let third = history.rounds[&3].candidate.as_ref().unwrap();
    assert_eq!(branches["refs/heads/hone/c1/kept"], third.commit);
    assert_eq!(branches[&format!("refs/heads/{}", third.branch)], third.commit);
    assert_eq!(third.parent, history.rounds[&1].candidate.as_ref().unwrap().commit);
    assert_eq!(branches.len(), 4);
    assert_eq!(place.belongings(), before);

    // From 0.1 to 0.4: the whole effect, on the part of the held-out items that nothing else used.
    let closed = history.closed.clone().unwrap();
    let total = closed.total.unwrap();
    assert!((total.effect - 0.3).abs() < 0.02, "{total:?}");
    assert_eq!((closed.subset.fold, total.n), (Some((4, 5)), 4));

    // What is known of the noise grows: the two baseline runs, then the incumbent's side of the confirmation and the new incumbent's runs.
    let confirmed = history.rounds[&1].ruling.as_ref().unwrap().confirmation.unwrap().n;
    assert_eq!((history.noise(1).df, history.noise(2).df), (1, 1 + (confirmed - 1) + 1));

    // Each confirmation has its own level, seeds and items; no seed serves two purposes.
    let confirmations: Vec<_> = history.rounds.values().filter_map(|r| r.screened.as_ref()?.confirmation).collect();
    assert_eq!(
        confirmations.iter().map(|c| (c.index, c.subset.fold, c.looks)).collect::<Vec<_>>(),
        [(1, Some((0, 5)), 1), (2, Some((1, 5)), 1)]
    );
    assert!(confirmations[0].alpha > confirmations[1].alpha);

    let seen = setting.fake.seen.lock().unwrap();
    let trains = || seen.iter().filter(|s| s.argv[1] == "train");
    let evals = || seen.iter().filter(|s| s.argv[1] == "eval");
    assert!(evals().all(|s| s.cwd.ends_with("runs/c1/trusted/tree")));
    assert!(trains().all(|s| {
        s.cwd.ends_with(format!("{}/tree", s.folder.parent().unwrap().file_name().unwrap().to_str().unwrap()))
    }));
    let capped = trains().filter(|s| s.argv.contains(&"compute.flops=1000000".to_string())).count();
    assert_eq!(capped, trains().count() - 2, "all but the baseline's two");
    let held_out: BTreeSet<_> = evals()
        .filter(|s| s.argv.contains(&"held_out".into()))
        .map(|s| s.folder.parent().unwrap().parent().unwrap())
        .collect();
    let dev: BTreeSet<_> = evals()
        .filter(|s| s.argv.contains(&"dev".into()))
        .map(|s| s.folder.parent().unwrap().parent().unwrap())
        .collect();
    assert!(held_out.is_disjoint(&dev));
    assert_eq!(setting.fake.trained(), history.cost.runs);
    // Under the goal's time, and under guards that keep the machine whole.
    assert!(seen.iter().all(|s| s.limits.wall == Some(history.started.goal.runs.timeout)));
    assert!(seen.iter().all(|s| s.limits.processes == Some(512)));
    assert!(!cfg!(target_os = "linux") || seen.iter().all(|s| s.limits.memory.is_some_and(|m| m.0 > 0)));
}

#[tokio::test]
async fn the_table_and_the_queue_say_what_happened() {
    let place = Place::usual();
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let overview = status::overview(&place.workspace(), &place.ledger().await, "c1").await.unwrap();
    assert_eq!((overview.state, overview.reason.as_deref()), (State::Over, Some("rounds")));
    assert_eq!(overview.baseline.scores.len(), 2);
    let row = &overview.rounds[0];
    assert_eq!(
        (row.round, row.change.as_str(), row.verdict, row.kept),
        (1, "lr 0.1 → 0.3", Some(Verdict::Better), true)
    );
    let effect = row.effect.unwrap();
    assert!((row.score.unwrap() - row.incumbent.unwrap() - effect.effect).abs() < 1e-9);
    assert!(effect.interval.unwrap()[0] > 0.0);
    assert_eq!((row.cost.runs, row.cost.model_tokens), (2 + 2 * effect.n, 10));
    // The script names no price: marked as such, and not as free.
    assert_eq!((row.cost.usd, row.cost.unpriced_calls, row.cost.unpriced_tokens), (0.0, 1, 10));
    let shown = serde_json::to_value(&overview).unwrap();
    assert_eq!((&shown["cost"]["unpriced_tokens"], &shown["cost"]["unpriced_calls"]), (&json!(30), &json!(3)));
    assert_eq!(
        overview.queue.iter().map(|i| (i.id.as_str(), i.state, i.open)).collect::<Vec<_>>(),
        [("c1/r001", review::State::Provisional, true), ("c1/r003", review::State::Provisional, true)]
    );
    assert_eq!(overview.confirmations, 2);
    let detail = review::detail(&place.workspace(), &place.history().await, 1).unwrap();
    assert!(detail.diff.contains("+lr: 0.3") && detail.diff.contains("-lr: 0.1"));
    assert_eq!(detail.seeds.len(), 2 + effect.n);
    assert!(detail.reports.iter().all(|r| place.workspace().runs_path("c1").join(&r.path).exists()));
    serde_json::to_string(&(overview, detail)).unwrap();
}

#[tokio::test]
async fn a_person_decides_alone_where_the_goal_says_so() {
    let place = Place::with_goal(&person(GOAL));
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let history = place.history().await;
    assert!(history.kept.is_empty() && history.closed.is_none());
    assert!(history.rounds.values().all(|r| r.observed.as_ref().unwrap().incumbent == history.baseline()));
    assert!(!place.branches().contains_key("refs/heads/hone/c1/kept"));
    let waiting: Vec<_> = review::items(&history).into_iter().map(|i| (i.round, i.state)).collect();
    assert_eq!(waiting, [(1, review::State::Waiting), (3, review::State::Waiting)]);
}

#[tokio::test]
async fn the_number_of_slots_changes_no_verdict() {
    let mut rulings = Vec::new();
    for parallel in [1, 3] {
        let place = Place::with_goal(&GOAL.replace("parallel: 2", &format!("parallel: {parallel}")));
        Setting::default().drive(&place, &usual_script()).await.unwrap();
        let history = place.history().await;
        rulings.push(history.rounds.values().map(|r| r.ruling.clone()).collect::<Vec<_>>());
    }
    assert_eq!(rulings[0], rulings[1]);
}

#[tokio::test]
async fn a_candidate_that_fails_has_its_class_and_the_campaign_goes_on() {
    let modes = [
        ("diverge", Verdict::Invalid),
        ("nan", Verdict::Invalid),
        ("slow", Verdict::Incomplete),
        ("large", Verdict::Incomplete),
        ("crash", Verdict::Invalid),
        ("silent", Verdict::Invalid),
        ("tamper", Verdict::Invalid),
    ];
    let place = Place::with_goal(&GOAL.replace("rounds: 3", "rounds: 8"));
    let script = Script::of(move |seen| match modes.get(seen.round as usize - 1) {
        Some((mode, _)) => {
            let edit = |key: &str, value| Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value };
            Ok(proposal(mode, vec![edit("mode", json!(mode)), edit("lr", json!(0.3))]))
        }
        None => Ok(set("lr", json!(0.3))),
    });
    assert_eq!(Setting::default().drive(&place, &script).await, Ok(over("rounds")));
    let expected: Vec<_> = modes.iter().map(|m| Some(m.1)).chain([Some(Verdict::Better)]).collect();
    assert_eq!(verdicts(&place).await, expected);
    let history = place.history().await;
    assert_eq!(history.kept, [8]);
    let reason = |round: u32| history.rounds[&round].ruling.as_ref().unwrap().reason.clone();
    assert!(reason(1).contains("diverged"), "{}", reason(1));
    assert!(reason(3).contains("limit of time"), "{}", reason(3));
    assert!(reason(7).contains("evals/add.yaml"), "{}", reason(7));
    assert_eq!(review::items(&history).len(), 1);
}

#[tokio::test]
async fn later_proposals_see_what_earlier_ones_came_to() {
    let place = Place::usual();
    let script = Script::of(|seen| {
        match seen.round {
            1 => assert!(seen.history.is_empty()),
            2 => {
                let past = &seen.history[0];
                assert_eq!((past.verdict, past.changes.len()), (Some(Verdict::Invalid), 1));
                assert!(seen.failed_run.as_ref().unwrap().contains("loss is NaN"), "{:?}", seen.failed_run);
            }
            _ => assert_eq!(seen.history[1].refusal.as_deref(), Some("Only seeds would differ.")),
        }
        assert_eq!(seen.files["recipe/recipe.yaml"], RECIPE);
        assert_eq!((seen.incumbent.scores.len(), seen.files.len(), seen.rounds_left), (2, 1, 4 - seen.round));
        Ok(set(
            ["mode", "seed", "lr"][seen.round as usize - 1],
            [json!("diverge"), json!(5), json!(0.05)][seen.round as usize - 1].clone(),
        ))
    });
    assert_eq!(Setting::default().drive(&place, &script).await, Ok(over("rounds")));
    let history = place.history().await;
    assert_eq!(history.rounds[&2].cost.runs, 0);
    assert!(history.rounds[&2].candidate.is_none());
}

#[tokio::test]
async fn refusals_name_their_reason() {
    let floors = "floors: [{suite: evals/qa.yaml, name: qa/accuracy, max_drop: 0.1}]\n";
    let place = Place::with_goal(&format!("{GOAL}{floors}").replace("[recipe/**]", "[recipe/**, prompts/**]"));
    std::os::unix::fs::symlink("/etc", place.root().join("recipe/link")).unwrap();
    let rows: String = (0..100).map(|i| format!("{{\"q\": \"{i}?\", \"a\": \"{i}\"}}\n")).collect();
    place.write("data/held.jsonl", &rows);
    let suite = |splits: &str| {
        let hash = hex::encode(Sha256::digest(&rows));
        let data = format!("{{file: data/held.jsonl, sha256: {hash}, question: q, answer: a}}");
        format!("tasks:\n  - {{name: qa, data: {data}, splits: {splits}}}\n")
    };
    place.write("evals/qa.yaml", &suite("{train: 0.2, dev: 0.4, held_out: 0.4}"));
    place.write("evals/other.yaml", &suite("{train: 0.8, dev: 0.1, held_out: 0.1}"));
    place.commit("A link, and questions that judge");
    let campaign = Setting::default().campaign(&place).await.unwrap();
    let history = campaign.history();
    let workspace = place.workspace();
    let scope = campaign.goal().scope("goal.yaml", &[]).unwrap();
    let check = |tree: &std::path::Path, _: &str| {
        assert!(tree.join("goal.yaml").exists());
        let recipe = std::fs::read_to_string(tree.join("recipe/recipe.yaml")).unwrap();
        match recipe.contains("lr: 1000") {
            true => Err(Failure::new(Class::Usage, "`lr` is too large.")),
            false => Ok(Default::default()),
        }
    };
    let parent = history.head.subject.commit.clone();
    let admitting =
        Admitting { workspace: &workspace, history: &history, scope: &scope, parent: &parent, check_recipe: &check };
    let write =
        |file: &str, content: &str| proposal("t", vec![Edit::Write { file: file.into(), content: content.into() }]);
    let cases: Vec<(Proposal, Reason)> = vec![
        (write("evals/add.yaml", "x"), Reason::Scope),
        (write("../x", "x"), Reason::Scope),
        (write("/etc/passwd", "x"), Reason::Scope),
        (write(".git/config", "x"), Reason::Scope),
        (write("recipe/.git/config", "x"), Reason::Scope),
        (write("recipe/link/x", "x"), Reason::Scope),
        (write("recipe/link", "x"), Reason::Scope),
        (write("recipe/recipe.yaml/x", "x"), Reason::Scope),
        (write("recipe/RECIPE.yaml", "x"), Reason::Scope),
        (write("recipe/big.txt", &"x".repeat(1 << 20)), Reason::Size),
        (write("recipe/recipe.yaml", RECIPE), Reason::Edits),
        (write("recipe/recipe.yaml", "lr: ["), Reason::Edits),
        (write("recipe/recipe.yaml", &format!("# remark\n{RECIPE}")), Reason::NoChange),
        (set("seed", json!(3)), Reason::SeedOnly),
        (set("compute.tokens", json!(9)), Reason::Compute),
        (set("lr", json!(1000)), Reason::Recipe),
        (proposal("t", Vec::new()), Reason::NoChange),
        (Proposal { hypothesis: " ".into(), ..set("lr", json!(1)) }, Reason::Incomplete),
        (Proposal { predicted_effect: f64::NAN, ..set("lr", json!(1)) }, Reason::Incomplete),
        (write("prompts/repair.hbs", "Do as you like."), Reason::Scope),
        (set("stages.0.sft.file", json!("data/held.jsonl")), Reason::Source),
        (set("stages.0.sft.file", json!("./data//held.jsonl")), Reason::Source),
        (set("stages.0.sft.file", json!("DATA/held.jsonl")), Reason::Source),
        (set("stages.0.sft.file", json!("data/../data/held.jsonl")), Reason::Source),
        (set("stages.0.sft.file", json!("/etc/passwd")), Reason::Source),
        (set("stages.0.sft.file", json!("recipe/link/passwd")), Reason::Source),
        (set("tokenizer", json!("../../tokenizer.json")), Reason::Source),
        (set("model.from", json!("/abs/run")), Reason::Source),
        (set("model.from", json!("recipe/checkpoint")), Reason::Source),
        (set("stages.0.sft.task", json!("evals/other.yaml")), Reason::Source),
        (write("recipe/own.yaml", &suite("{train: 1.0, dev: 0.0, held_out: 0.0}")), Reason::Source),
    ];
    for (proposal, reason) in cases {
        match admitting.admit(&proposal).unwrap() {
            Admission::Refused(refusal) => {
                assert_eq!(refusal.reason, reason, "{proposal:?}: {}", refusal.message);
                let key = match &proposal.edits[..] {
                    [Edit::Set { key, .. }] if reason == Reason::Source => format!("`{key}`"),
                    _ => String::new(),
                };
                assert!(refusal.message.contains(&key), "{refusal:?}");
                assert!(refusal.hint.is_some() || reason != Reason::Source, "{refusal:?}");
            }
            Admission::Admitted(_) => panic!("{proposal:?} was admitted"),
        }
    }
    // The judging suite itself may be named: training sees its train split alone.
    let own = admitting.admit(&set("stages.0.sft.task", json!("evals/qa.yaml"))).unwrap();
    assert!(matches!(own, Admission::Admitted(_)), "{own:?}");
    match admitting.admit(&set("lr", json!(0.2))).unwrap() {
        Admission::Admitted(admitted) => assert_eq!(admitted.changes.len(), 1),
        refused => panic!("{refused:?}"),
    }
}

#[tokio::test]
async fn what_the_incumbent_trains_on_may_stay_wherever_it_moves() {
    let recipe = "lr: 0.1\nmodel: {from: base}\nstages:\n  - sft: {task: text, file: data/text.txt}\n";
    let goal = GOAL.replace(
        "{suite: evals/add.yaml, name: add/pass@1,",
        "{suite: evals/text.yaml, name: text/loss, direction: minimize,",
    );
    let suite = "tasks:\n  - {name: text, data: {native: text, file: data/text.txt, length: 64}}\n";
    let text: String = (0..2000).map(|i| format!("Line {i} of the text.\n")).collect();
    let files = [
        ("goal.yaml", &goal[..]),
        ("recipe/recipe.yaml", recipe),
        ("evals/text.yaml", suite),
        ("data/text.txt", &text),
    ];
    let place = Place::new(&files);
    let campaign = Setting::default().campaign(&place).await.unwrap();
    let (history, workspace) = (campaign.history(), place.workspace());
    assert_eq!(history.started.data, ["data/text.txt"]);
    let scope = campaign.goal().scope("goal.yaml", &history.started.data).unwrap();
    let parent = history.head.subject.commit.clone();
    let check = |_: &std::path::Path, _: &str| Ok(Default::default());
    let admitting =
        Admitting { workspace: &workspace, history: &history, scope: &scope, parent: &parent, check_recipe: &check };
    let admit = |old: &str, new: &str| {
        let edit = Edit::Replace { file: "recipe/recipe.yaml".into(), old: old.into(), new: new.into() };
        match admitting.admit(&proposal("t", vec![edit])).unwrap() {
            Admission::Admitted(_) => None,
            Admission::Refused(refusal) => Some(refusal.reason),
        }
    };
    assert_eq!(admit("stages:\n", "stages:\n  - sft: {task: addition}\n"), None);
    assert_eq!(admit("{from: base}", "{preset: hybrid-nano}"), None);
    assert_eq!(admit("{from: base}", "{from: other}"), Some(Reason::Source));
    assert_eq!(admit("task: text, file", "task: addition, name"), Some(Reason::Source));
}

#[tokio::test]
async fn prompts_come_from_the_trusted_commit_and_cannot_be_edited() {
    let place =
        Place::with_goal(&GOAL.replace("[recipe/**]", "[recipe/**, prompts/**]").replace("rounds: 3", "rounds: 1"));
    place.write("prompts/repair.hbs", "Mend {{problem}}.");
    place.write("prompts/notes.md", "Not a template.");
    place.commit("Prompts of our own");
    let script = Script::of(|seen| {
        assert_eq!(seen.prompts.keys().collect::<Vec<_>>(), ["prompts/repair.hbs"]);
        assert_eq!(seen.prompts["prompts/repair.hbs"], "Mend {{problem}}.");
        assert_eq!(seen.files.keys().collect::<Vec<_>>(), ["recipe/recipe.yaml"]);
        Ok(set("lr", json!(0.3)))
    });
    assert_eq!(Setting::default().drive(&place, &script).await, Ok(over("rounds")));
}

#[tokio::test]
async fn what_was_tried_is_not_tried_again_unless_something_is_different() {
    let place = Place::usual();
    let script = Script::of(|seen| {
        let differs = (seen.round == 3).then(|| "longer warm-up elsewhere".to_string());
        Ok(Proposal { differs, ..set("lr", json!(0.11)) })
    });
    Setting::default().drive(&place, &script).await.unwrap();
    let history = place.history().await;
    let reason = |n: u32| match history.rounds[&n].admission.as_ref().unwrap() {
        Admission::Refused(refusal) => Some(refusal.reason),
        Admission::Admitted(_) => None,
    };
    assert_eq!([reason(1), reason(2), reason(3)], [None, Some(Reason::Repeat), None]);
    assert_eq!(history.rounds[&3].ruling.as_ref().unwrap().flags, ["repeats round 1"]);
}

#[tokio::test]
async fn trouble_of_the_machine_costs_no_round() {
    let place = Place::usual();
    let setting = Setting::default();
    *setting.fake.flaky.lock().unwrap() = 2;
    let script = Script::of(|_| {
        let edit = |key: &str, value| Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value };
        Ok(proposal("flaky", vec![edit("mode", json!("flaky")), edit("lr", json!(0.3))]))
    });
    // Both screening runs fail once: tried again at once.
    let mut goal_rounds = setting.clone();
    goal_rounds.options = Options { rounds: Some(1), seed: 0 };
    assert_eq!(goal_rounds.drive(&place, &script).await, Ok(over("rounds")));
    assert_eq!(verdicts(&place).await, [Some(Verdict::Better)]);

    // Failing again and again pauses, and going on later finishes the same round.
    let place = Place::usual();
    *goal_rounds.fake.flaky.lock().unwrap() = 100;
    let failure = goal_rounds.drive(&place, &script).await.unwrap_err();
    assert_eq!(failure.class, Class::Infrastructure);
    let overview = status::overview(&place.workspace(), &place.ledger().await, "c1").await.unwrap();
    assert_eq!((overview.state, overview.rounds.len()), (State::Paused, 1));
    assert_eq!(overview.failure, Some(failure));
    *goal_rounds.fake.flaky.lock().unwrap() = 0;
    assert_eq!(goal_rounds.drive(&place, &script).await, Ok(over("rounds")));
    assert_eq!(verdicts(&place).await, [Some(Verdict::Better)]);
}

#[tokio::test]
async fn an_unreachable_proposer_pauses_and_spends_nothing() {
    let place = Place::usual();
    let down = Script(Arc::new(|_| {
        Err(Failure::new(Class::Infrastructure, "The endpoint does not answer.").hint("Start it."))
    }));
    let failure = Setting::default().drive(&place, &down).await.unwrap_err();
    assert_eq!((failure.class, failure.hint.as_deref()), (Class::Infrastructure, Some("Start it.")));
    assert!(place.history().await.rounds[&1].proposed.is_none());
    assert_eq!(Setting::default().drive(&place, &usual_script()).await, Ok(over("rounds")));
    assert_eq!(place.history().await.kept, [1, 3]);
}

#[tokio::test]
async fn rounds_without_a_candidate_pause_after_a_while() {
    let place = Place::with_goal(&GOAL.replace("rounds: 3", "rounds: 7"));
    let lost = Script::of(|_| Err(Failure::new(Class::Agent, "Only prose.")));
    let failure = Setting::default().drive(&place, &lost).await.unwrap_err();
    assert_eq!(failure.class, Class::Agent);
    assert!(failure.message.contains("Only prose."), "{failure}");
    assert_eq!(place.history().await.rounds.len(), 5);
    assert_eq!(Setting::default().drive(&place, &usual_script()).await, Ok(over("rounds")));
    let history = place.history().await;
    assert_eq!((history.rounds.len(), history.kept.clone()), (7, vec![6]));
}

#[tokio::test]
async fn a_gain_that_breaks_a_floor_is_worse() {
    let floors = "floors: [{suite: evals/add.yaml, name: add/accuracy, max_drop: 0.005}]\n";
    let place = Place::with_goal(&format!("{GOAL}{floors}").replace("rounds: 3", "rounds: 1"));
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let history = place.history().await;
    let ruling = history.rounds[&1].ruling.as_ref().unwrap();
    assert_eq!(ruling.verdict, Verdict::Worse);
    assert!(ruling.reason.contains("add/accuracy fell by more"), "{}", ruling.reason);
    assert!(ruling.confirmation.unwrap().effect > 0.1);
    assert!(review::items(&history).is_empty());
}

#[tokio::test]
async fn what_else_differs_is_flagged_and_left_to_a_person() {
    let place = Place::with_goal(
        &GOAL.replace("when: better", "when: better, unless: flagged").replace("rounds: 3", "rounds: 2"),
    );
    let script = Script::of(|seen| {
        let edit = |key: &str, value| Edit::Set { file: "recipe/recipe.yaml".into(), key: key.into(), value };
        let mode = ["hungry", "segmented"][seen.round as usize - 1];
        Ok(proposal(mode, vec![edit("mode", json!(mode)), edit("lr", json!(0.3))]))
    });
    Setting::default().drive(&place, &script).await.unwrap();
    let history = place.history().await;
    let flags = |n: u32| history.rounds[&n].ruling.as_ref().unwrap().flags.clone();
    assert_eq!(flags(1), ["a run counted 2.00 times the incumbent's operations"]);
    assert_eq!(flags(2), ["measured with another model.segmentation"]);
    assert_eq!(verdicts(&place).await, [Some(Verdict::Better); 2]);
    assert!(history.kept.is_empty());
    assert_eq!(review::items(&history).len(), 2);

    // Measured by another harness is not comparable at all.
    let place = Place::usual();
    let failure = Setting::default().drive(&place, &Script::sets(&[("mode", json!("newer"))])).await.unwrap_err();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("harness"), "{failure}");
}

/// Drives c1 while another process asks for something when round 2 is proposed.
async fn asked_in_round_2(place: &Place, wanted: Request) -> Result<End> {
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let acting = Acting {
        script: usual_script(),
        round: 2,
        action: move || {
            let (workspace, ledger) = (workspace.clone(), ledger.clone());
            async move { campaign::request(&workspace, &ledger, "c1", wanted).await.unwrap() }
        },
    };
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(acting)];
    Setting::default().campaign(place).await?.run(&proposers).await
}

#[tokio::test]
async fn a_request_pauses_or_stops_at_the_next_step() {
    for (wanted, rounds_made) in [(Request::Pause, 1), (Request::Stop, 2)] {
        let place = Place::usual();
        let end = asked_in_round_2(&place, wanted).await;
        let history = place.history().await;
        let made = history.rounds.values().filter(|r| r.learned.is_some()).count();
        assert_eq!(made, rounds_made, "{wanted:?}");
        match wanted {
            Request::Pause => {
                assert_eq!(end, Ok(End::Paused));
                let overview = status::overview(&place.workspace(), &place.ledger().await, "c1").await.unwrap();
                assert_eq!(overview.state, State::Paused);
                assert_eq!(Setting::default().drive(&place, &usual_script()).await, Ok(over("rounds")));
                assert_eq!(place.history().await.kept, [1, 3]);
            }
            Request::Stop => {
                assert_eq!(end, Ok(over("stopped")));
                assert_eq!(verdicts(&place).await, [Some(Verdict::Better), Some(Verdict::Incomplete)]);
                assert!(
                    campaign::request(&place.workspace(), &place.ledger().await, "c1", Request::Pause).await.is_err()
                );
            }
        }
    }
}

#[tokio::test]
async fn a_budget_ends_a_campaign_between_rounds() {
    let place = Place::with_goal(&GOAL.replace("rounds: 3", "rounds: 3, tokens: 15"));
    assert_eq!(Setting::default().drive(&place, &usual_script()).await, Ok(over("tokens")));
    let history = place.history().await;
    assert_eq!((history.rounds.len(), history.cost.model_tokens), (2, 20));
    assert!(history.closed.is_some(), "what was kept is still measured");
}

#[tokio::test]
async fn a_call_that_the_budget_does_not_hold_ends_the_campaign() {
    let place = Place::with_goal(&GOAL.replace("rounds: 3", "rounds: 4, tokens: 5k"));
    let asked = Arc::new(Mutex::new(0));
    let count = asked.clone();
    let script = Script(Arc::new(move |seen| {
        *count.lock().unwrap() += 1;
        match seen.round {
            1 => (usual_script().0)(seen),
            _ => {
                let meter = Meter::new(Budget { tokens: Some(5), usd: None }, Spend::default(), |_| Ok(()));
                Err(refused_call(&meter))
            }
        }
    }));
    assert_eq!(Setting::default().drive(&place, &script).await, Ok(over("tokens")));
    let history = place.history().await;
    assert_eq!((history.rounds.len(), history.kept.clone()), (2, vec![1]));
    assert!(history.rounds[&2].candidate.is_none());
    assert!(history.rounds[&2].refusal().unwrap().contains("budget of tokens"));
    assert!(history.closed.is_some(), "what was kept is still measured");
    let overview = status::overview(&place.workspace(), &place.ledger().await, "c1").await.unwrap();
    assert_eq!((overview.state, overview.reason.as_deref()), (State::Over, Some("tokens")));
    // Resuming asks nobody again.
    assert_eq!(Setting::default().drive(&place, &script).await, Ok(over("tokens")));
    assert_eq!(*asked.lock().unwrap(), 2);
}

/// What a client says when the meter does not hold its call.
fn refused_call(meter: &Arc<Meter>) -> Failure {
    let endpoint = Endpoint { attempts: 1, ..Endpoint::new("m", "http://127.0.0.1:9/v1") };
    let client = Client::new(endpoint, meter.clone(), "propose").unwrap();
    std::thread::scope(|scope| {
        let ask = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(client.chat(&[Message::user("Hello?")], None, 100, None)).unwrap_err()
        };
        scope.spawn(ask).join().unwrap()
    })
}

#[tokio::test]
async fn an_evaluation_that_writes_where_it_is_measured_from_is_an_integrity_violation() {
    let place = Place::usual();
    let setting = Setting::default();
    let script = Script::sets(&[("mode", json!("meddle"))]);
    let failure = setting.drive(&place, &script).await.unwrap_err();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("evals/add.yaml was changed during an evaluation"), "{failure}");
    let history = place.history().await;
    let candidate = history.rounds[&1].candidate.as_ref().unwrap();
    assert_eq!(history.reports(&candidate.commit).count(), 0, "its score is not used");
    // Nothing is measured from there until the tree is made anew.
    let failure = setting.drive(&place, &script).await.unwrap_err();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("not as it was exported"), "{failure}");
}

#[tokio::test]
async fn a_campaign_goes_on_with_the_goal_it_began_with() {
    let place = Place::usual();
    assert_eq!(asked_in_round_2(&place, Request::Pause).await, Ok(End::Paused));
    place.write("goal.yaml", &GOAL.replace("min_effect: 0.03", "min_effect: 0.9").replace("rounds: 3", "rounds: 1"));
    let edited = place.commit("Ask for more");

    let notes = Arc::new(Notes::default());
    let watched = Setting { observer: Some(notes.clone()), ..Setting::default() };
    assert_eq!(watched.drive(&place, &usual_script()).await, Ok(over("rounds")));
    let history = place.history().await;
    assert_eq!((history.rounds.len(), history.kept.clone()), (3, vec![1, 3]));
    assert_eq!(history.started.goal.metric.min_effect, 0.03);
    assert!(notes.0.lock().unwrap().iter().any(|note| note.contains("The goal has changed since")));

    // The edited goal is another campaign's, with a baseline of its own.
    let goal = place.root().join("goal.yaml");
    let options = Options::default();
    let start = Campaign::start(&goal, &options, place.ledger().await, watched.toolbox(), Arc::new(()));
    let next = start.await.unwrap();
    next.run(&[Arc::new(usual_script())]).await.unwrap();
    let history = next.history();
    assert_eq!((next.name(), history.started.trusted.as_str()), ("c2", edited.as_str()));
    assert_eq!(history.screening_scores(&history.baseline()).len(), 2);
    assert_eq!(history.rounds[&1].ruling.as_ref().unwrap().verdict, Verdict::Undecided);
}

/// What a campaign says beside its steps.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Observer for Notes {
    fn see(&self, progress: &Progress<'_>) {
        if let Progress::Note(note) = progress {
            self.0.lock().unwrap().push(note.to_string());
        }
    }
}

#[tokio::test]
async fn what_a_newer_version_wrote_still_loads() {
    let place = Place::usual();
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let ledger = place.ledger().await;
    let known = place.history().await;
    let mut events = ledger.events("c1").await.unwrap();
    for event in &mut events {
        // An admission is its one member's; all others are the object itself.
        let payload = event.payload.as_object_mut().unwrap();
        let payload = if event.kind == "admission" {
            payload.values_mut().next().unwrap().as_object_mut().unwrap()
        } else {
            payload
        };
        payload.insert("novel".into(), json!({"key": [1, 2]}));
    }
    let status = |history: &History| serde_json::to_value(Overview::of(history, false)).unwrap();
    assert_eq!(status(&History::of(&events).unwrap()), status(&known));

    // An event of an unknown kind, in a known round and in none, is kept and passed over.
    for round in [2, 77] {
        ledger.append(NewEvent::new("c1", round, "distilled", "distilled", json!({"into": "c9"}))).await.unwrap();
    }
    let again = place.history().await;
    assert_eq!((again.rounds.len(), again.kept.clone()), (3, vec![1, 3]));
    ledger.verify("c1").await.unwrap();
    assert_eq!(Setting::default().drive(&place, &usual_script()).await, Ok(over("rounds")));

    // What cannot be passed over is named.
    events[0].payload["goal"]["novel"] = json!(1);
    let failure = History::of(&events).unwrap_err();
    assert!(
        failure.class == Class::Integrity && failure.hint.unwrap().contains("another version"),
        "{}",
        failure.message
    );
}

#[tokio::test]
async fn starts_at_once_have_names_of_their_own() {
    let place = Place::usual();
    let (goal, options) = (place.root().join("goal.yaml"), Options::default());
    // A start that holds its name and has not written yet.
    let held = place.workspace().try_lock("c1").unwrap();
    let start = async || {
        Campaign::start(&goal, &options, place.ledger().await, Setting::default().toolbox(), Arc::new(()))
            .await
            .unwrap()
    };
    let (one, two) = tokio::join!(start(), start());
    let mut names = [one.name(), two.name()];
    names.sort();
    assert_eq!(names, ["c2", "c3"]);
    drop(held);
    assert_eq!(place.ledger().await.campaigns().await.unwrap().len(), 2);
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(usual_script())];
    let (a, b) = tokio::join!(one.run(&proposers), two.run(&proposers));
    assert_eq!((a, b), (Ok(over("rounds")), Ok(over("rounds"))));
}

#[tokio::test]
async fn what_killed_processes_left_is_removed_and_what_others_hold_stays() {
    let place = Place::usual();
    let leave = |path: &str| place.write(&format!("{path}/tree/a"), "half");
    leave(".hone/scratch-dead");
    leave(".hone/scratch-held");
    let held = std::fs::File::open(place.root().join(".hone/scratch-held")).unwrap();
    held.try_lock().unwrap();
    let left = |path: &str| place.root().join(path).exists();
    let campaign = Setting::default().campaign(&place).await.unwrap();
    assert!(!left(".hone/scratch-dead") && left(".hone/scratch-held"));
    drop(campaign);

    leave("runs/c1/baseline/.exporting-x");
    leave("runs/c9/baseline/.exporting-x");
    assert_eq!(Setting::default().drive(&place, &usual_script()).await, Ok(over("rounds")));
    assert!(!left("runs/c1/baseline/.exporting-x") && left("runs/c9/baseline/.exporting-x"));
    let scratch = std::fs::read_dir(place.root().join(".hone")).unwrap().flatten();
    let scratch: Vec<_> =
        scratch.map(|e| e.file_name()).filter(|n| n.to_string_lossy().starts_with("scratch-")).collect();
    assert_eq!(scratch, ["scratch-held"]);
}

#[tokio::test]
async fn a_campaign_refuses_what_it_could_not_see_or_use() {
    let start = |place: Place| async move {
        let failure = Setting::default().campaign(&place).await.err().unwrap();
        assert!(place.ledger().await.campaigns().await.unwrap().is_empty());
        failure
    };
    let place = Place::usual();
    place.write("recipe/recipe.yaml", "lr: 0.2\n");
    let failure = start(place).await;
    assert!(failure.message.contains("recipe/recipe.yaml differs"), "{failure}");
    let failure = start(Place::with_goal(&GOAL.replace("add/pass@1", "add/pass@2"))).await;
    assert_eq!(failure.class, Class::Usage);
    assert!(failure.to_string().contains("add/pass@1"), "{failure}");
    let failure = start(Place::with_goal(&GOAL.replace("evals/add.yaml", "evals/none.yaml"))).await;
    assert!(failure.message.contains("evals/none.yaml"), "{failure}");
    let failure = start(Place::with_goal(&GOAL.replace("min_effect: 0.03", "min_effect: 0.03, folds: 60"))).await;
    assert!(failure.at.unwrap().contains("held_out"));
}

#[tokio::test]
async fn a_baseline_without_a_score_is_said_at_once() {
    let place = Place::usual();
    place.write("recipe/recipe.yaml", &RECIPE.replace("mode: plain", "mode: diverge"));
    place.commit("Broken");
    let failure = Setting::default().drive(&place, &usual_script()).await.unwrap_err();
    assert_eq!(failure.class, Class::Candidate);
    assert!(failure.hint.unwrap().contains("stderr.log"));
}

#[tokio::test]
async fn a_report_of_another_checkpoint_is_an_integrity_violation() {
    let place = Place::with_goal(&GOAL.replace("parallel: 2", "parallel: 1"));
    let setting = Setting::default();
    for drives in 1..=2 {
        let failure = setting.drive(&place, &Script::sets(&[("mode", json!("forged"))])).await.unwrap_err();
        assert_eq!(failure.class, Class::Integrity);
        assert!(failure.message.contains("another checkpoint"), "{failure}");
        // What was not believed is measured again after a resume, not read again.
        assert_eq!(setting.fake.most_starts(), drives);
    }
}

#[tokio::test]
async fn one_driver_at_a_time() {
    let place = Place::usual();
    let campaign = Setting::default().campaign(&place).await.unwrap();
    assert_eq!(Setting::default().campaign(&place).await.err().unwrap().class, Class::Usage);
    assert_eq!(status::overview(&place.workspace(), &place.ledger().await, "c1").await.unwrap().state, State::Running);
    drop(campaign);
    Setting::default().campaign(&place).await.unwrap();
}

#[tokio::test]
async fn a_moved_branch_is_never_overwritten() {
    let place = Place::usual();
    let workspace = place.workspace();
    let repository = git2::Repository::open(workspace.root()).unwrap();
    let head = repository.head().unwrap().target().unwrap();
    repository.reference("refs/heads/hone/c1/r001-set-lr-to-0-3", head, false, "mine").unwrap();
    let failure = Setting::default().drive(&place, &usual_script()).await.unwrap_err();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("r001-set-lr-to-0-3"), "{failure}");
}

#[tokio::test]
async fn proposers_take_turns() {
    let place = Place::usual();
    let named = |source: &'static str| -> Arc<dyn Proposer> {
        Arc::new(Script::of(move |seen| {
            Ok(Proposal { source: source.into(), ..set("lr", json!(0.1 + 0.001 * f64::from(seen.round))) })
        }))
    };
    Setting::default().campaign(&place).await.unwrap().run(&[named("a"), named("b")]).await.unwrap();
    let history = place.history().await;
    let sources: Vec<String> = history
        .rounds
        .values()
        .map(|r| match r.proposed.as_ref().unwrap() {
            Proposed { answer: Ok(proposal), .. } => proposal.source.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sources, ["a", "b", "a"]);
}

#[tokio::test]
async fn a_later_campaign_uses_no_seed_and_no_held_out_part_again() {
    let place = Place::usual();
    let setting = Setting::default();
    setting.drive(&place, &usual_script()).await.unwrap();
    let first = place.history().await;
    let goal = place.root().join("goal.yaml");
    let second = Campaign::start(&goal, &setting.options, place.ledger().await, setting.toolbox(), Arc::new(()));
    let second = second.await.unwrap();
    let started = second.started();
    assert_eq!((second.name(), started.earlier, started.looks), ("c2", 1, first.confirmations(u32::MAX).0));
    let seeds = |started: &Started| -> BTreeSet<u64> {
        let of = |round| (0..50).flat_map(move |i| [(round, i, false), (round, i, true)]);
        let seed = |(round, i, fresh)| match fresh {
            true => started.confirmation_seed(round, i),
            false => started.screening_seed(round, i),
        };
        (0..=101).flat_map(of).map(seed).collect()
    };
    assert!(seeds(&first.started).is_disjoint(&seeds(started)));
    second.run(&[Arc::new(usual_script())]).await.unwrap();
    let folds = second.history();
    let folds = folds.rounds.values().filter_map(|r| r.screened.as_ref()?.confirmation).map(|c| c.subset.fold);
    assert_eq!(folds.collect::<Vec<_>>(), [Some((2, 5)), Some((3, 5))]);
}
