//! The ledger from outside: append once, chain, fold, many writers, and files that cannot be used.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hone_runs::ledger::{Ledger, Moment, NewEvent};
use hone_runs::{Class, Failure};
use serde_json::{Value, json};

async fn ledger(folder: &Path) -> Ledger {
    Ledger::open(&folder.join("ledger.db")).await.unwrap()
}

fn new(round: u32, step: &str, payload: Value) -> NewEvent {
    NewEvent::new("c1", round, step, "done", payload)
}

/// Changes the file behind the ledger's back, as someone with the sqlite3 program would.
async fn tamper(folder: &Path, statements: &'static [&'static str]) {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.join("ledger.db"));
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    for statement in statements {
        sqlx::query(*statement).execute(&pool).await.unwrap();
    }
    pool.close().await;
}

#[tokio::test]
async fn appending_again_returns_the_stored_event() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path()).await;
    let first = ledger.append(new(1, "run", json!({"loss": 1.5, "volatile": {"pid": 1}}))).await.unwrap();
    assert!(first.fresh && first.event.position == 1 && first.event.previous_hash.is_empty());

    let again = ledger.append(new(1, "run", json!({"volatile": {"pid": 2}, "loss": 1.5}))).await.unwrap();
    assert_eq!((again.fresh, again.differs, &again.event), (false, false, &first.event));
    let other = ledger.append(new(1, "run", json!({"loss": 9.0}))).await.unwrap();
    assert_eq!((other.fresh, other.differs, &other.event), (false, true, &first.event));

    let replicate = ledger.append(new(1, "run", json!({})).replicate(1)).await.unwrap();
    assert_eq!((replicate.fresh, replicate.event.position), (true, 2));
    assert_eq!(replicate.event.previous_hash, first.event.hash);
    assert_eq!(ledger.events_after("c1", 1).await.unwrap(), vec![replicate.event.clone()]);
    assert_eq!(ledger.find("c1", 1, "run", 1, "done").await.unwrap(), Some(replicate.event));
    assert_eq!(ledger.find("c1", 1, "run", 2, "done").await.unwrap(), None);
}

#[tokio::test]
async fn it_outlives_the_process_and_keeps_campaigns_apart() {
    let dir = tempfile::tempdir().unwrap();
    let first = ledger(dir.path()).await;
    first.append(new(1, "run", json!({"x": 0.1 + 0.2}))).await.unwrap();
    first.append(NewEvent::new("c0", 1, "run", "done", json!(null))).await.unwrap();
    let events = first.events("c1").await.unwrap();
    first.close().await;
    let second = ledger(dir.path()).await;
    assert_eq!(second.events("c1").await.unwrap(), events);
    assert_eq!(events[0].payload["x"].as_f64(), Some(0.1 + 0.2));
    assert_eq!(second.campaigns().await.unwrap().len(), 2);
    assert_eq!(second.verify("c0").await.unwrap().events, 1);
    assert_eq!(second.verify("nothing").await.unwrap().events, 0);
}

#[tokio::test]
async fn the_database_itself_refuses_to_forget() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path()).await;
    ledger.append(new(1, "run", json!({}))).await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(ledger.path());
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    for statement in [
        "UPDATE events SET payload = '{}'",
        "DELETE FROM events",
        "INSERT INTO events VALUES ('c1', 9, 1, 's', 0, 'k', '{}', 0, '', '')",
    ] {
        let error = sqlx::query(statement).execute(&pool).await.unwrap_err().to_string();
        assert!(error.contains("append-only") || error.contains("must follow"), "{error}");
    }
}

#[tokio::test]
async fn tampering_is_found_and_named() {
    for (change, position) in [
        ("UPDATE events SET payload = '{\"loss\":0.0}' WHERE position = 2", 2),
        ("UPDATE events SET at = at - 1 WHERE position = 3", 3),
        ("DELETE FROM events WHERE position = 2", 3),
        ("UPDATE events SET payload = '{' WHERE position = 1", 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let ledger = ledger(dir.path()).await;
        for round in 1..=4 {
            ledger.append(new(round, "run", json!({"loss": round}))).await.unwrap();
        }
        assert_eq!(ledger.verify("c1").await.unwrap().events, 4);
        tamper(dir.path(), &["DROP TRIGGER events_are_not_updated", "DROP TRIGGER events_are_not_deleted"]).await;
        tamper(dir.path(), Box::leak(Box::new([change]))).await;
        let failure = ledger.verify("c1").await.unwrap_err();
        assert_eq!(failure.class, Class::Integrity);
        assert!(failure.message.starts_with(&format!("Event {position} of campaign `c1`")), "{change}: {failure}");
    }
}

#[tokio::test]
async fn the_fold_knows_no_times_and_no_order_of_replicates() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (unbroken, resumed) = (ledger(one.path()).await, ledger(two.path()).await);
    for (ledger, order, pid) in [(&unbroken, [0, 1], 7), (&resumed, [1, 0], 8)] {
        ledger.append(new(1, "propose", json!({"edit": "lr", "volatile": {"pid": pid}}))).await.unwrap();
        if pid == 8 {
            ledger
                .append(NewEvent::new("c1", 1, "run", "restarted", json!({"volatile": {"attempt": 2}})))
                .await
                .unwrap();
        }
        for replicate in order {
            let payload = json!({"items": [{"score": replicate, "volatile": {"wall_s": pid}}]});
            ledger.append(new(1, "run", payload).replicate(replicate)).await.unwrap();
        }
        ledger.append(new(1, "judge", json!({"a": 1, "b": 2}))).await.unwrap();
    }
    let (left, right) = (unbroken.canonical_fold("c1").await.unwrap(), resumed.canonical_fold("c1").await.unwrap());
    assert_eq!(left, right);
    let order: Vec<_> = left.events.iter().map(|event| (event.step.as_str(), event.replicate)).collect();
    assert_eq!(order, [("propose", 0), ("run", 0), ("run", 1), ("judge", 0)]);
    assert_eq!(left.events[1].payload, json!({"items": [{"score": 0}]}));

    resumed.append(new(2, "propose", json!({}))).await.unwrap();
    assert_ne!(resumed.canonical_fold("c1").await.unwrap().hash, left.hash);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn four_writers_at_once_make_one_chain() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.db");
    let fresh = Arc::new(AtomicUsize::new(0));
    let writers = (0..4).map(|writer: i64| {
        let (path, fresh) = (path.clone(), fresh.clone());
        tokio::spawn(async move {
            let ledger = Ledger::open(&path).await.unwrap();
            for round in 0..10 {
                ledger.append(new(round, "own", json!({})).replicate(writer)).await.unwrap();
                let shared = ledger.append(new(round, "shared", json!({}))).await.unwrap();
                fresh.fetch_add(shared.fresh.into(), Ordering::SeqCst);
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let ledger = Ledger::open(&path).await.unwrap();
    assert_eq!(ledger.verify("c1").await.unwrap().events, 50);
    assert_eq!(fresh.load(Ordering::SeqCst), 10);
}

#[tokio::test]
async fn a_fault_before_leaves_nothing_and_a_fault_after_leaves_the_event() {
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for (moment, stored) in [(Moment::Before, 0), (Moment::After, 1)] {
        let seen = seen.clone();
        let faulty = ledger(dir.path()).await.with_fault_hook(Arc::new(move |at, event| {
            seen.lock().unwrap().push((at, event.step.clone()));
            if at == moment { Err(Failure::new(Class::Other, "Aborted.")) } else { Ok(()) }
        }));
        assert_eq!(faulty.append(new(1, "run", json!({}))).await.unwrap_err().message, "Aborted.");
        assert_eq!(faulty.events("c1").await.unwrap().len(), stored);
    }
    let moments: Vec<_> = seen.lock().unwrap().iter().map(|(moment, _)| *moment).collect();
    assert_eq!(moments, [Moment::Before, Moment::Before, Moment::After]);
}

#[tokio::test]
async fn files_that_cannot_be_used_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.db");
    std::fs::write(&path, "this is no database, however long it may be").unwrap();
    let failure = Ledger::open(&path).await.err().unwrap();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("damaged") && failure.hint.unwrap().contains("restore"));

    let failure = Ledger::open(Path::new("/proc/no/ledger.db")).await.err().unwrap();
    assert_eq!(failure.class, Class::Infrastructure);
}
