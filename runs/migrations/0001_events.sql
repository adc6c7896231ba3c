-- The ledger: append-only events, a hash chain a campaign. `payload` is JSON text exactly as hashed; `at` is milliseconds since
-- the Unix epoch.
CREATE TABLE events (
    campaign      TEXT    NOT NULL,
    position      INTEGER NOT NULL CHECK (position > 0),
    round         INTEGER NOT NULL,
    step          TEXT    NOT NULL,
    replicate     INTEGER NOT NULL,
    kind          TEXT    NOT NULL,
    payload       TEXT    NOT NULL,
    at            INTEGER NOT NULL,
    previous_hash TEXT    NOT NULL,
    hash          TEXT    NOT NULL,
    PRIMARY KEY (campaign, position),
    UNIQUE (campaign, round, step, replicate, kind)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER events_are_not_updated BEFORE UPDATE ON events
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only');
END;

CREATE TRIGGER events_are_not_deleted BEFORE DELETE ON events
BEGIN
    SELECT RAISE(ABORT, 'the ledger is append-only');
END;

CREATE TRIGGER events_continue_their_chain BEFORE INSERT ON events
WHEN NEW.position != (SELECT COALESCE(MAX(position), 0) + 1 FROM events WHERE campaign = NEW.campaign)
BEGIN
    SELECT RAISE(ABORT, 'an event must follow the last of its campaign');
END;
