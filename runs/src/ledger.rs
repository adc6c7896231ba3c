//! The ledger: the append-only record of every campaign, one hash chain each, in SQLite. It stores and returns events; what they
//! mean is the campaign's to know.
//!
//! An event is keyed by (campaign, round, step, replicate, kind). Appending a key again returns the stored event, so a step that
//! was recorded is not recorded twice, whatever died in between.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteRow, SqliteSynchronous};
use sqlx::{Row, SqliteConnection, SqlitePool};

use crate::clock;
use crate::failure::{Class, Context, Failure, Result};

/// The payload's member for what may differ between two runs of the same campaign: times, durations, process ids, hosts, attempts.
/// It is left out of the fold, at any depth; an event that says nothing else is left out as a whole.
pub const VOLATILE: &str = "volatile";

/// What is appended. Times and hashes are the ledger's.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// The campaign's name.
    pub campaign: String,
    /// The round; 0 is the baseline's.
    pub round: u32,
    /// The step within the round.
    pub step: String,
    /// Which replicate of the step; 0 where there is one.
    pub replicate: i64,
    /// What happened.
    pub kind: String,
    /// Everything else that is known of it.
    pub payload: Value,
}

impl NewEvent {
    /// An event of replicate 0.
    pub fn new(
        campaign: impl Into<String>,
        round: u32,
        step: impl Into<String>,
        kind: impl Into<String>,
        payload: Value,
    ) -> Self {
        Self { campaign: campaign.into(), round, step: step.into(), replicate: 0, kind: kind.into(), payload }
    }
    /// The same event of another replicate.
    #[must_use]
    pub fn replicate(self, replicate: i64) -> Self {
        Self { replicate, ..self }
    }
}

/// A stored event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Its place in the campaign's chain, from 1.
    pub position: i64,
    /// The campaign's name.
    pub campaign: String,
    /// The round; 0 is the baseline's.
    pub round: u32,
    /// The step within the round.
    pub step: String,
    /// Which replicate of the step.
    pub replicate: i64,
    /// What happened.
    pub kind: String,
    /// Everything else that is known of it.
    pub payload: Value,
    /// When it was appended, in milliseconds since the Unix epoch.
    pub at: i64,
    /// The hash of the event before it; empty for the first.
    pub previous_hash: String,
    /// SHA-256 over all of the above, hex.
    pub hash: String,
}

/// What an append did.
#[derive(Clone, Debug, PartialEq)]
pub struct Appended {
    /// The event as it is stored.
    pub event: Event,
    /// False where the key was there before: then nothing was written.
    pub fresh: bool,
    /// The key was there with a payload that differs beyond its volatile part. The stored one stands.
    pub differs: bool,
}

/// A chain that was found intact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Chain {
    /// How many events it has.
    pub events: i64,
    /// The last event's hash: it names the whole chain.
    pub head: String,
}

/// One event as the fold keeps it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Folded {
    /// The round.
    pub round: u32,
    /// The step.
    pub step: String,
    /// The replicate.
    pub replicate: i64,
    /// What happened.
    pub kind: String,
    /// The payload without its volatile parts, keys sorted.
    pub payload: Value,
}

/// A campaign without times, durations, processes, hosts and attempts. Two campaigns are the same when their folds' hashes are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fold {
    /// The events by (round, step, replicate), steps in the order of their first appearance in the round.
    pub events: Vec<Folded>,
    /// SHA-256 over them, hex.
    pub hash: String,
}

/// When a fault hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the append's transaction begins.
    Before,
    /// After it is committed.
    After,
}

/// Called around every append, by tests that abort a campaign at each; an error becomes the append's.
pub type FaultHook = Arc<dyn Fn(Moment, &NewEvent) -> Result<()> + Send + Sync>;

/// The ledger of a workspace. Clones share one pool; processes share the file.
#[derive(Clone)]
pub struct Ledger {
    pool: SqlitePool,
    path: PathBuf,
    fault: Option<FaultHook>,
}

impl Ledger {
    /// Opens the ledger at `path`, made and migrated where needed.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where the file cannot be opened or stays locked; [`Class::Integrity`] where it is damaged.
    pub async fn open(path: &Path) -> Result<Self> {
        let failed = |error| failure(path, "open", error);
        let lock = open_lock(path).await?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // In WAL mode only FULL survives a loss of power.
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(60));
        let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await.map_err(failed)?;
        let mut migrations = sqlx::migrate!("./migrations");
        // A ledger that a newer binary has migrated stays readable.
        migrations.set_ignore_missing(true).run(&pool).await.map_err(|error| failed(error.into()))?;
        drop(lock);
        Ok(Self { pool, path: path.to_path_buf(), fault: None })
    }

    /// The same ledger with `hook` called around every append.
    #[must_use]
    pub fn with_fault_hook(self, hook: FaultHook) -> Self {
        Self { fault: Some(hook), ..self }
    }

    /// Where the ledger lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes the pool, so that SQLite folds its write-ahead log into the file.
    pub async fn close(self) {
        self.pool.close().await;
    }

    /// Appends `new` in one transaction, or returns the stored event of the same key.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where the disk is full or the file stays locked; [`Class::Integrity`] where it is damaged. Nothing
    /// was written then.
    pub async fn append(&self, new: NewEvent) -> Result<Appended> {
        self.fault(Moment::Before, &new)?;
        let appended = self.insert(&new).await.map_err(|error| failure(&self.path, "append to", error))?;
        self.fault(Moment::After, &new)?;
        Ok(appended)
    }

    fn fault(&self, moment: Moment, new: &NewEvent) -> Result<()> {
        self.fault.as_ref().map_or(Ok(()), |hook| hook(moment, new))
    }

    async fn insert(&self, new: &NewEvent) -> std::result::Result<Appended, sqlx::Error> {
        // IMMEDIATE takes the write lock before the first read: a deferred transaction cannot wait for it later.
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
        let key = (new.campaign.as_str(), new.round, new.step.as_str(), new.replicate, new.kind.as_str());
        if let Some(event) = find(&mut transaction, key).await? {
            let differs = canonical(&event.payload) != canonical(&new.payload);
            return Ok(Appended { event, fresh: false, differs });
        }
        let last = sqlx::query("SELECT position, hash FROM events WHERE campaign = $1 ORDER BY position DESC LIMIT 1")
            .bind(&new.campaign)
            .fetch_optional(&mut *transaction)
            .await?;
        let (last, previous_hash): (i64, String) = match last {
            Some(row) => (row.try_get(0)?, row.try_get(1)?),
            None => (0, String::new()),
        };
        let payload = new.payload.to_string();
        let mut event = Event {
            position: last + 1,
            campaign: new.campaign.clone(),
            round: new.round,
            step: new.step.clone(),
            replicate: new.replicate,
            kind: new.kind.clone(),
            payload: new.payload.clone(),
            at: now(),
            previous_hash,
            hash: String::new(),
        };
        event.hash = hash(&event, &payload);
        sqlx::query("INSERT INTO events VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)")
            .bind(&event.campaign)
            .bind(event.position)
            .bind(event.round)
            .bind(&event.step)
            .bind(event.replicate)
            .bind(&event.kind)
            .bind(&payload)
            .bind(event.at)
            .bind(&event.previous_hash)
            .bind(&event.hash)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(Appended { event, fresh: true, differs: false })
    }

    /// The event of a key, where it was appended.
    ///
    /// # Errors
    /// Where the ledger cannot be read.
    pub async fn find(
        &self,
        campaign: &str,
        round: u32,
        step: &str,
        replicate: i64,
        kind: &str,
    ) -> Result<Option<Event>> {
        let found = async {
            let mut connection = self.pool.acquire().await?;
            find(&mut connection, (campaign, round, step, replicate, kind)).await
        };
        found.await.map_err(|error| failure(&self.path, "read", error))
    }

    /// All events of a campaign in the order they were appended.
    ///
    /// # Errors
    /// Where the ledger cannot be read.
    pub async fn events(&self, campaign: &str) -> Result<Vec<Event>> {
        self.events_after(campaign, 0).await
    }

    /// The events of a campaign past `position`: what a watcher has not seen.
    ///
    /// # Errors
    /// Where the ledger cannot be read.
    pub async fn events_after(&self, campaign: &str, position: i64) -> Result<Vec<Event>> {
        let rows = self.rows(campaign, position).await?;
        rows.iter().map(|row| event(row).map_err(|error| failure(&self.path, "read", error))).collect()
    }

    async fn rows(&self, campaign: &str, position: i64) -> Result<Vec<SqliteRow>> {
        sqlx::query("SELECT * FROM events WHERE campaign = $1 AND position > $2 ORDER BY position")
            .bind(campaign)
            .bind(position)
            .fetch_all(&self.pool)
            .await
            .map_err(|error| failure(&self.path, "read", error))
    }

    /// The names of all campaigns, oldest first.
    ///
    /// # Errors
    /// Where the ledger cannot be read.
    pub async fn campaigns(&self) -> Result<Vec<String>> {
        sqlx::query_scalar("SELECT campaign FROM events WHERE position = 1 ORDER BY at, campaign")
            .fetch_all(&self.pool)
            .await
            .map_err(|error| failure(&self.path, "read", error))
    }

    /// Checks the file and the campaign's chain: every hash, every link, no gap.
    ///
    /// # Errors
    /// [`Class::Integrity`], naming the first event that is not as it was appended.
    pub async fn verify(&self, campaign: &str) -> Result<Chain> {
        let check: String = sqlx::query_scalar("PRAGMA quick_check(1)")
            .fetch_one(&self.pool)
            .await
            .map_err(|error| failure(&self.path, "read", error))?;
        if check != "ok" {
            return Err(damaged(&self.path, &check));
        }
        let mut chain = Chain { events: 0, head: String::new() };
        for row in self.rows(campaign, 0).await? {
            let position: i64 = row.try_get("position").map_err(|error| failure(&self.path, "read", error))?;
            let broken = |why: &str| {
                let message = format!("Event {position} of campaign `{campaign}` is not as it was appended: {why}.");
                Failure::new(Class::Integrity, message)
                    .hint("something other than Hone changed the ledger; restore it from a copy, and trust nothing past this event")
                    .at(self.path.display().to_string())
            };
            let event = event(&row).map_err(|error| broken(&format!("it cannot be read ({error})")))?;
            if position != chain.events + 1 {
                return Err(broken(&format!("{} stands before it", chain.events)));
            }
            if event.previous_hash != chain.head {
                return Err(broken("it does not follow the event before it"));
            }
            let payload: String = row.try_get("payload").map_err(|_| broken("its payload cannot be read"))?;
            if event.hash != hash(&event, &payload) {
                return Err(broken("its content does not match its hash"));
            }
            chain = Chain { events: position, head: event.hash };
        }
        Ok(chain)
    }

    /// What the campaign is, whenever and wherever it ran and however often it was interrupted.
    ///
    /// # Errors
    /// Where the ledger cannot be read.
    pub async fn canonical_fold(&self, campaign: &str) -> Result<Fold> {
        Ok(fold(&self.events(campaign).await?))
    }
}

/// The fold of events in the order they were appended. Steps of a round are ordered by their first appearance, which is the order
/// the driver walks them in; within (round, step, replicate) events keep their order. Replicates that ran side by side may have been
/// appended in any order.
pub fn fold(events: &[Event]) -> Fold {
    let mut steps: Vec<(u32, &str)> = Vec::new();
    let mut keyed: Vec<((u32, usize, i64), Folded)> = Vec::new();
    for event in events {
        let Some(payload) = canonical(&event.payload) else { continue };
        let step = (event.round, event.step.as_str());
        let rank = steps.iter().position(|known| *known == step).unwrap_or_else(|| {
            steps.push(step);
            steps.len() - 1
        });
        let Event { round, step, replicate, kind, .. } = event.clone();
        keyed.push(((round, rank, replicate), Folded { round, step, replicate, kind, payload }));
    }
    keyed.sort_by_key(|(key, _)| *key);
    let events: Vec<Folded> = keyed.into_iter().map(|(_, folded)| folded).collect();
    let mut digest = Sha256::new();
    for Folded { round, step, replicate, kind, payload } in &events {
        hash_parts(&mut digest, &[&round.to_string(), step, &replicate.to_string(), kind, &payload.to_string()]);
    }
    Fold { events, hash: hex::encode(digest.finalize()) }
}

/// The payload with sorted keys and without its volatile parts; `None` where it is volatile as a whole.
pub fn canonical(payload: &Value) -> Option<Value> {
    let volatile_only = payload.as_object().is_some_and(|members| members.len() == 1 && members.contains_key(VOLATILE));
    (!volatile_only).then(|| settled(payload))
}

fn settled(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().filter(|(key, _)| *key != VOLATILE).collect();
            members.sort_by_key(|(key, _)| *key);
            Value::Object(members.into_iter().map(|(key, value)| (key.clone(), settled(value))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.iter().map(settled).collect()),
        other => other.clone(),
    }
}

/// Each part with its length before it, so that no two lists of parts have the same bytes.
fn hash_parts(digest: &mut Sha256, parts: &[&str]) {
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
}

fn hash(event: &Event, payload: &str) -> String {
    let mut digest = Sha256::new();
    let numbers = [event.position, event.round.into(), event.replicate, event.at].map(|number| number.to_string());
    let [position, round, replicate, at] = &numbers;
    hash_parts(
        &mut digest,
        &[&event.previous_hash, &event.campaign, position, round, &event.step, replicate, &event.kind, payload, at],
    );
    hex::encode(digest.finalize())
}

async fn find(
    connection: &mut SqliteConnection,
    (campaign, round, step, replicate, kind): (&str, u32, &str, i64, &str),
) -> std::result::Result<Option<Event>, sqlx::Error> {
    let row = sqlx::query(
        "SELECT * FROM events WHERE campaign = $1 AND round = $2 AND step = $3 AND replicate = $4 AND kind = $5",
    )
    .bind(campaign)
    .bind(round)
    .bind(step)
    .bind(replicate)
    .bind(kind)
    .fetch_optional(connection)
    .await?;
    row.as_ref().map(event).transpose()
}

fn event(row: &SqliteRow) -> std::result::Result<Event, sqlx::Error> {
    let payload: String = row.try_get("payload")?;
    Ok(Event {
        position: row.try_get("position")?,
        campaign: row.try_get("campaign")?,
        round: row.try_get("round")?,
        step: row.try_get("step")?,
        replicate: row.try_get("replicate")?,
        kind: row.try_get("kind")?,
        payload: serde_json::from_str(&payload).map_err(|error| sqlx::Error::Decode(error.into()))?,
        at: row.try_get("at")?,
        previous_hash: row.try_get("previous_hash")?,
        hash: row.try_get("hash")?,
    })
}

/// Processes that open a new ledger at once would race each other's migrations: one at a time holds this lock.
async fn open_lock(path: &Path) -> Result<std::fs::File> {
    let path = path.to_path_buf();
    let name = path.display().to_string();
    let lock = tokio::task::spawn_blocking(move || {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = path.into_os_string();
        file.push("-open");
        let lock = std::fs::File::create(file)?;
        lock.lock()?;
        Ok::<_, std::io::Error>(lock)
    });
    lock.await
        .map_err(std::io::Error::other)
        .flatten()
        .context(Class::Infrastructure, || format!("Cannot open the ledger {name}"))
}

fn now() -> i64 {
    i64::try_from(clock::now().as_millis()).unwrap_or(i64::MAX)
}

/// SQLite's primary result codes (sqlite.org/rescode.html) in our words.
fn failure(path: &Path, doing: &str, error: sqlx::Error) -> Failure {
    let code = match &error {
        sqlx::Error::Database(error) => error.code().and_then(|code| code.parse::<u32>().ok()).map(|code| code & 0xff),
        _ => None,
    };
    let name = path.display();
    let infrastructure = |why: &str, hint: &str| {
        Failure::new(Class::Infrastructure, format!("Cannot {doing} the ledger {name}: {why}.")).hint(hint)
    };
    match (code, &error) {
        (Some(11 | 26), error) => damaged(path, &error.to_string()),
        (_, sqlx::Error::Decode(error)) => damaged(path, &error.to_string()),
        (Some(5 | 6), _) | (_, sqlx::Error::PoolTimedOut) => {
            infrastructure("another process holds it locked", "end that process, then resume")
        }
        (Some(13), _) => infrastructure(
            "the disk is full",
            "free some space (checkpoints below `runs/` take most of it), then resume",
        ),
        (Some(8 | 23), _) => infrastructure("it is read-only", "make it writable, then resume"),
        _ => infrastructure(&error.to_string(), "check the disk and the file's permissions, then resume"),
    }
}

fn damaged(path: &Path, why: &str) -> Failure {
    Failure::new(Class::Integrity, format!("The ledger {} is damaged: {}.", path.display(), why.trim_end_matches('.')))
        .hint("restore it from a copy; `sqlite3 ledger.db .recover` saves what can still be read")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn a_full_disk_fails_the_append_and_keeps_the_chain() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("ledger.db")).await.unwrap();
        let event = |round, payload| NewEvent::new("c1", round, "run", "done", payload);
        ledger.append(event(1, json!({}))).await.unwrap();
        // A page limit is how SQLite meets a full disk without filling one; it holds for a connection, so all of the pool get it.
        let mut connections = Vec::new();
        for _ in 0..ledger.pool.options().get_max_connections() {
            connections.push(ledger.pool.acquire().await.unwrap());
        }
        for connection in &mut connections {
            sqlx::query("PRAGMA max_page_count = 20").fetch_one(&mut **connection).await.unwrap();
        }
        drop(connections);
        let failure = ledger.append(event(2, json!({"blob": "x".repeat(1 << 20)}))).await.unwrap_err();
        assert_eq!(failure.class, Class::Infrastructure);
        assert!(failure.message.ends_with("the disk is full."), "{failure}");
        assert_eq!(ledger.verify("c1").await.unwrap().events, 1);
        assert!(ledger.append(event(2, json!({}))).await.unwrap().fresh);
    }
}
