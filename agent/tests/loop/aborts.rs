//! A campaign that dies at any point goes on as if it had not: aborted before and after every event, and after every effect between events.

use crate::fake::Fake;
use crate::support::{Place, Script, Setting, usual_script};
use hone_agent::campaign::End;
use hone_agent::record::Ended;
use hone_runs::Result;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What must be the same: the canonical fold, the branches, and what is kept.
#[derive(Debug, PartialEq)]
struct Trace {
    fold: String,
    branches: BTreeMap<String, String>,
    kept: Vec<u32>,
}

/// Thrown in place of a panic, so that the hook of panics prints nothing.
struct Aborted;

const GOAL: &str = "goal: raise the score\nmetric: {suite: evals/add.yaml, name: add/pass@1, min_effect: 0.03}\nedit: [recipe/**]\n\
    runs: {replicates: 2..3, parallel: 2}\nbudget: {rounds: 2}\nreview: {keep: policy, when: better}\n";

/// A process's life: drives until it is over or is aborted at point `at`. Says how many points were passed, and how it ended.
fn live(place: &Place, fake: &Arc<Fake>, script: &Script, at: usize) -> (usize, Option<Result<End>>) {
    let passed = Arc::new(AtomicUsize::new(0));
    let point = {
        let passed = passed.clone();
        move || {
            if passed.fetch_add(1, Ordering::SeqCst) == at {
                std::panic::resume_unwind(Box::new(Aborted));
            }
        }
    };
    let (one, two) = (point.clone(), point);
    let setting = Setting {
        fake: fake.clone(),
        ledger_fault: Some(Arc::new(move |_, _| {
            one();
            Ok(())
        })),
        effect_fault: Some(Arc::new(move |_| {
            two();
            Ok(())
        })),
        ..Setting::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ended =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(setting.drive(place, script))));
    drop(runtime);
    let ended = ended.map_err(|thrown| assert!(thrown.is::<Aborted>(), "a panic of the campaign's own")).ok();
    (passed.load(Ordering::SeqCst), ended)
}

fn trace(place: &Place) -> Trace {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ledger = place.ledger().await;
        ledger.verify("c1").await.unwrap();
        let fold = ledger.canonical_fold("c1").await.unwrap();
        Trace { fold: fold.hash, branches: place.branches(), kept: place.history().await.kept }
    })
}

fn over() -> Option<Result<End>> {
    Some(Ok(End::Over(Ended { reason: "rounds".into() })))
}

/// Aborts at every point whose number is `part` modulo `of`.
fn abort_at_every(part: usize, of: usize) {
    let script = usual_script();
    let unbroken = Place::with_goal(GOAL);
    let (points, ended) = live(&unbroken, &Arc::default(), &script, usize::MAX);
    assert_eq!(ended, over());
    let expected = trace(&unbroken);
    assert_eq!(expected.kept, [1]);
    assert!(points > 100, "{points}");
    for at in (part..points).step_by(of) {
        let (place, fake) = (Place::with_goal(GOAL), Arc::default());
        let (_, ended) = live(&place, &fake, &script, at);
        assert_eq!(ended, None, "point {at}");
        let (_, ended) = live(&place, &fake, &script, usize::MAX);
        assert_eq!(ended, over(), "point {at}");
        assert_eq!(trace(&place), expected, "point {at}");
        assert_eq!(fake.most_starts(), 1, "point {at}");
    }
}

#[test]
fn a_campaign_survives_an_abort_at_points_0_mod_4() {
    abort_at_every(0, 4);
}

#[test]
fn a_campaign_survives_an_abort_at_points_1_mod_4() {
    abort_at_every(1, 4);
}

#[test]
fn a_campaign_survives_an_abort_at_points_2_mod_4() {
    abort_at_every(2, 4);
}

#[test]
fn a_campaign_survives_an_abort_at_points_3_mod_4() {
    abort_at_every(3, 4);
}

#[test]
fn a_campaign_that_dies_again_and_again_gets_there() {
    let script = usual_script();
    let unbroken = Place::with_goal(GOAL);
    live(&unbroken, &Arc::default(), &script, usize::MAX);
    let (place, fake) = (Place::with_goal(GOAL), Arc::default());
    let mut lives = 0;
    // Every life gets a little further than the events that it must append for itself.
    while live(&place, &fake, &script, 9).1.is_none() {
        lives += 1;
        assert!(lives < 200);
    }
    assert!(lives > 5, "{lives}");
    assert_eq!(trace(&place), trace(&unbroken));
    assert_eq!(fake.most_starts(), 1);
}
