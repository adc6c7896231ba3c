//! What a person's decisions do: to the kept branch, to the incumbent, and to the campaign that goes on.

use crate::support::{Acting, GOAL, Place, Script, Setting, usual_script};
use hone_agent::campaign::End;
use hone_agent::history::History;
use hone_agent::judge::Verdict;
use hone_agent::proposal::{Decision, Proposer};
use hone_agent::review::{self, State};
use hone_runs::{Class, Result, folder};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;

fn person() -> String {
    GOAL.replace("review: {keep: policy, when: better}", "review: {keep: person}")
}

fn commit(history: &History, round: u32) -> String {
    history.rounds[&round].candidate.as_ref().unwrap().commit.clone()
}

fn states(history: &History) -> Vec<(u32, State, bool)> {
    let mut states: Vec<_> = review::items(history).into_iter().map(|i| (i.round, i.state, i.open)).collect();
    states.sort_by_key(|s| s.0);
    states
}

#[tokio::test]
async fn keeping_moves_the_incumbent_and_makes_others_stale() {
    let place = Place::with_goal(&person());
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let history = place.history().await;
    let outcome = review::keep(&workspace, &ledger, "c1", 1).await.unwrap();
    assert!(outcome.fresh);
    assert_eq!(outcome.incumbent.subject.commit, commit(&history, 1));
    assert_eq!(place.branches()["refs/heads/hone/c1/kept"], commit(&history, 1));
    assert!(!review::keep(&workspace, &ledger, "c1", 1).await.unwrap().fresh, "once is enough");
    let history = place.history().await;
    assert_eq!(history.rounds[&1].decisions.len(), 1);
    assert_eq!(states(&history), [(1, State::Kept, false), (3, State::Waiting, true)]);

    let stale = review::keep(&workspace, &ledger, "c1", 3).await.unwrap_err();
    assert!(stale.message.contains("measured against"), "{stale}");
    assert!(review::items(&history).iter().any(|i| i.flags == ["measured against an earlier incumbent"]));
    let unproven = review::keep(&workspace, &ledger, "c1", 2).await.unwrap_err();
    assert!(unproven.message.contains("only a confirmed improvement"), "{unproven}");
    assert_eq!(review::keep(&workspace, &ledger, "c1", 9).await.unwrap_err().class, Class::Usage);
}

#[tokio::test]
async fn a_running_campaign_takes_up_what_a_person_keeps_and_notes() {
    let place = Place::with_goal(&person());
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let notes = Arc::new(Mutex::new(Vec::new()));
    let seen = notes.clone();
    let base = usual_script();
    let script = Script(Arc::new(move |observation| {
        seen.lock().unwrap().push(observation.notes.clone());
        (base.0)(observation)
    }));
    let acting = Acting {
        script,
        round: 2,
        action: move || {
            let (workspace, ledger) = (workspace.clone(), ledger.clone());
            async move {
                review::keep(&workspace, &ledger, "c1", 1).await.unwrap();
                review::iterate(&workspace, &ledger, "c1", 1, " try depth, too ").await.unwrap();
            }
        },
    };
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(acting)];
    assert!(matches!(Setting::default().campaign(&place).await.unwrap().run(&proposers).await, Ok(End::Over(_))));
    let history = place.history().await;
    let incumbent = |round: u32| history.rounds[&round].observed.as_ref().unwrap().incumbent.clone();
    assert_eq!(incumbent(2), history.baseline());
    assert_eq!(incumbent(3).subject.commit, commit(&history, 1));
    // Run again on seeds of its own before anything is compared with it.
    assert_eq!(history.screening_scores(&incumbent(3)).len(), 2);
    assert_eq!(history.rounds[&3].ruling.as_ref().unwrap().verdict, Verdict::Better);
    assert_eq!(notes.lock().unwrap().as_slice(), [vec![], vec![], vec!["On round 1: try depth, too".to_string()]]);
    assert!(history.closed.is_some());
    assert_eq!(states(&history), [(1, State::Kept, false), (3, State::Waiting, true)]);
}

#[tokio::test]
async fn rolling_back_the_newest_goes_back_to_what_was_there() {
    let place = Place::usual();
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let history = place.history().await;
    let outcome = review::rollback(&workspace, &ledger, "c1", 3).await.unwrap();
    assert_eq!((outcome.decision, outcome.incumbent.subject.commit.clone()), (Decision::Rollback, commit(&history, 1)));
    assert_eq!(place.branches()["refs/heads/hone/c1/kept"], commit(&history, 1));
    let outcome = review::rollback(&workspace, &ledger, "c1", 1).await.unwrap();
    assert_eq!(outcome.incumbent, history.baseline());
    assert_eq!(place.branches()["refs/heads/hone/c1/kept"], history.started.trusted);
    assert!(!review::rollback(&workspace, &ledger, "c1", 1).await.unwrap().fresh);
    let history = place.history().await;
    assert_eq!(states(&history), [(1, State::RolledBack, false), (3, State::RolledBack, false)]);
    assert!(review::keep(&workspace, &ledger, "c1", 1).await.unwrap_err().message.contains("was rolled back"));
}

#[tokio::test]
async fn rolling_back_an_earlier_one_takes_out_that_change_alone() {
    let place = Place::with_goal(&GOAL.replace("rounds: 3", "rounds: 4"));
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let acting = Acting {
        script: Script::sets(&[("lr", json!(0.3)), ("depth", json!(1)), ("lr", json!(0.05)), ("lr", json!(0.05))]),
        round: 3,
        action: move || {
            let (workspace, ledger) = (workspace.clone(), ledger.clone());
            async move { drop(review::rollback(&workspace, &ledger, "c1", 1).await.unwrap()) }
        },
    };
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(acting)];
    Setting::default().campaign(&place).await.unwrap().run(&proposers).await.unwrap();
    let history = place.history().await;
    assert_eq!(history.kept, [2]);
    let head = &history.head.subject.commit;
    let recipe = place.workspace().text(head, "recipe/recipe.yaml").unwrap();
    assert!(recipe.contains("lr: 0.1\n") && recipe.contains("depth: 1\n"), "{recipe}");
    assert_eq!(place.branches()["refs/heads/hone/c1/kept"], *head);
    // What stays was measured together with what went: a person looks again. The new head has runs of its own.
    let item = review::items(&history).into_iter().find(|i| i.round == 2).unwrap();
    assert!(item.open && item.flags[0].contains("rolled back since"), "{item:?}");
    assert_eq!(history.rounds[&4].observed.as_ref().unwrap().incumbent.subject.commit, *head);
    assert_eq!(history.screening_scores(&history.head).len(), 2);
    let closed = history.closed.as_ref().unwrap();
    assert_eq!(closed.head, *head);
    assert!((closed.total.unwrap().effect - 0.1).abs() < 0.02);
    review::keep(&place.workspace(), &place.ledger().await, "c1", 2).await.unwrap();
    assert_eq!(states(&place.history().await)[1], (2, State::Kept, false));
}

#[tokio::test]
async fn a_rollback_under_later_changes_of_the_same_lines_guesses_nothing() {
    let place = Place::usual();
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let before = place.history().await;
    let refused = review::rollback(&place.workspace(), &place.ledger().await, "c1", 1).await.unwrap_err();
    assert!(refused.message.contains("same lines"), "{refused}");
    assert_eq!(place.history().await.position(), before.position());
}

#[tokio::test]
async fn a_round_whose_incumbent_was_rolled_back_meanwhile_is_left_to_a_person() {
    let place = Place::usual();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let acting = Acting {
        script: usual_script(),
        round: 3,
        action: move || {
            let (workspace, ledger) = (workspace.clone(), ledger.clone());
            async move { drop(review::rollback(&workspace, &ledger, "c1", 1).await.unwrap()) }
        },
    };
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(acting)];
    Setting::default().campaign(&place).await.unwrap().run(&proposers).await.unwrap();
    let history = place.history().await;
    let third = &history.rounds[&3];
    assert_eq!(third.ruling.as_ref().unwrap().verdict, Verdict::Better);
    assert_eq!(third.policy.as_ref().unwrap().head, None);
    assert!(history.kept.is_empty());
    assert_eq!(states(&history), [(1, State::RolledBack, false), (3, State::Waiting, true)]);
}

#[tokio::test]
async fn a_decision_is_bound_to_what_was_judged() {
    let place = Place::with_goal(&person());
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let history = place.history().await;
    let candidate = history.rounds[&1].candidate.as_ref().unwrap();
    let repository = git2::Repository::open(place.root()).unwrap();
    let name = format!("refs/heads/{}", candidate.branch);
    let head = repository.head().unwrap().target().unwrap();
    repository.reference(&name, head, true, "moved").unwrap();
    let refused = review::keep(&workspace, &ledger, "c1", 1).await.unwrap_err();
    assert_eq!(refused.class, Class::Integrity);
    repository.reference(&name, git2::Oid::from_str(&candidate.commit).unwrap(), true, "back").unwrap();

    let report = workspace.runs_path("c1").join(&history.reports(&candidate.commit).next().unwrap().path);
    let text = std::fs::read_to_string(&report).unwrap();
    std::fs::write(&report, text.replace("0.95", "0.96")).unwrap();
    assert!(review::keep(&workspace, &ledger, "c1", 1).await.unwrap_err().message.contains("was changed"));
    std::fs::remove_file(&report).unwrap();
    assert!(review::keep(&workspace, &ledger, "c1", 1).await.unwrap_err().message.contains("is missing"));
    std::fs::write(&report, text).unwrap();
    assert!(review::keep(&workspace, &ledger, "c1", 1).await.unwrap().fresh);
}

#[tokio::test]
async fn a_change_of_what_stands_behind_a_kept_change_is_found() {
    let place = Place::usual();
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let history = place.history().await;
    let hash = |checkpoint: &Path| -> Result<String> {
        let model: Value = folder::read_json(&checkpoint.join("model.json"))?.unwrap();
        Ok(model["hash"].as_str().unwrap().to_string())
    };
    let verified = review::verify(&workspace, &ledger, "c1", &hash).await.unwrap();
    assert!(verified.checkpoints > 8 && verified.missing == 0, "{verified:?}");
    assert_eq!(verified.kept, [commit(&history, 1), commit(&history, 3)]);
    assert_eq!(verified.events, history.position());
    assert!(verified.reports > 8, "{verified:?}");
    // Of the candidate, and of what it was compared with.
    for subject in [commit(&history, 3), history.started.trusted.clone()] {
        let report = workspace.runs_path("c1").join(&history.reports(&subject).next().unwrap().path);
        let text = std::fs::read_to_string(&report).unwrap();
        std::fs::write(&report, text.replace("0.95", "0.96")).unwrap();
        let failure = review::verify(&workspace, &ledger, "c1", &hash).await.unwrap_err();
        assert_eq!((failure.class, failure.class.exit_code()), (Class::Integrity, 4));
        assert!(failure.message.contains("was changed"), "{failure}");
        std::fs::remove_file(&report).unwrap();
        assert!(review::verify(&workspace, &ledger, "c1", &hash).await.unwrap_err().message.contains("is missing"));
        std::fs::write(&report, text).unwrap();
    }
    let run = history.runs(&commit(&history, 3)).next().unwrap();
    let model = workspace.runs_path("c1").join(&run.subject.name).join(format!("seed-{}", run.seed));
    let model = model.join("checkpoints/step-1/model.json");
    let text = std::fs::read_to_string(&model).unwrap();
    std::fs::write(&model, text.replace("\"hash\":", "\"hash\":\"0\",\"was\":")).unwrap();
    let failure = review::verify(&workspace, &ledger, "c1", &hash).await.unwrap_err();
    assert!(
        failure.class == Class::Integrity && failure.message.contains("not the one that was measured"),
        "{failure}"
    );
    std::fs::remove_dir_all(model.parent().unwrap()).unwrap();
    assert_eq!(review::verify(&workspace, &ledger, "c1", &hash).await.unwrap().missing, 1);
    // A branch that the ledger does not know, and the kept branch elsewhere: events were cut off, or somebody moved it.
    let repository = git2::Repository::open(workspace.root()).unwrap();
    let head = repository.head().unwrap().target().unwrap();
    let mut strange = repository.reference("refs/heads/hone/c1/r009-strange", head, false, "").unwrap();
    let failure = review::verify(&workspace, &ledger, "c1", &hash).await.unwrap_err();
    assert!(failure.class == Class::Integrity && failure.message.contains("r009-strange"), "{failure}");
    strange.delete().unwrap();
    repository.reference("refs/heads/hone/c1/kept", head, true, "").unwrap();
    let failure = review::verify(&workspace, &ledger, "c1", &hash).await.unwrap_err();
    assert!(failure.class == Class::Integrity && failure.message.contains("hone/c1/kept"), "{failure}");
}

#[tokio::test]
async fn a_note_needs_words_and_a_campaign_that_reads_them() {
    let place = Place::usual();
    Setting::default().drive(&place, &usual_script()).await.unwrap();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    assert!(review::iterate(&workspace, &ledger, "c1", 1, " ").await.unwrap_err().message.contains("empty"));
    assert!(review::iterate(&workspace, &ledger, "c1", 1, "x").await.unwrap_err().message.contains("is over"));
}

#[tokio::test]
async fn names_of_items_and_campaigns_are_read_kindly() {
    assert_eq!(review::parse_id("c2/r017").unwrap(), (Some("c2"), 17));
    assert_eq!(review::parse_id("r017-raise-lr").unwrap(), (None, 17));
    assert_eq!(review::parse_id("3").unwrap(), (None, 3));
    assert_eq!(review::parse_id("x").unwrap_err().class, Class::Usage);
    let place = Place::usual();
    let failure = History::load(&place.ledger().await, "c1").await.unwrap_err();
    assert!(failure.hint.unwrap().contains("hone campaign run"));
}
