-- The same tables as SQLite's, see ../sqlite. Texts are JSON that only we read, so they stay texts.
CREATE TABLE jobs (
    id            TEXT PRIMARY KEY,
    record        TEXT NOT NULL,
    config_text   TEXT NOT NULL,
    config_format TEXT NOT NULL,
    job_json      TEXT NOT NULL,
    inputs        TEXT NOT NULL
);

CREATE TABLE workers (
    id     TEXT PRIMARY KEY,
    record TEXT NOT NULL
);

CREATE TABLE events (
    job     TEXT NOT NULL,
    cursor  BIGINT NOT NULL,
    attempt TEXT,
    seq     BIGINT,
    trim    BIGINT NOT NULL,
    event   TEXT NOT NULL,
    PRIMARY KEY (job, cursor)
);

CREATE TABLE artifacts (
    job      TEXT NOT NULL,
    identity TEXT NOT NULL,
    name     TEXT NOT NULL,
    artifact TEXT NOT NULL,
    hash     TEXT,
    PRIMARY KEY (job, identity)
);
CREATE INDEX artifacts_by_hash ON artifacts (hash);

CREATE TABLE checkpoints (
    job      TEXT NOT NULL,
    cursor   BIGINT NOT NULL,
    manifest TEXT NOT NULL,
    PRIMARY KEY (job, cursor)
);

-- Who writes. Every transaction checks its epoch, so that a coordinator that lost the database to another one while it
-- slept can change nothing when it wakes.
CREATE TABLE writer (
    id    BIGINT PRIMARY KEY CHECK (id = 1),
    epoch BIGINT NOT NULL
);
INSERT INTO writer (id, epoch) VALUES (1, 0);
