-- A job: its record (the core's view, JSON) and what only its worker needs.
CREATE TABLE jobs (
    id            TEXT PRIMARY KEY NOT NULL,
    record        TEXT NOT NULL,
    config_text   TEXT NOT NULL,
    config_format TEXT NOT NULL,
    job_json      TEXT NOT NULL,
    inputs        TEXT NOT NULL
) STRICT;

-- A worker as it registered last (JSON).
CREATE TABLE workers (
    id     TEXT PRIMARY KEY NOT NULL,
    record TEXT NOT NULL
) STRICT;

-- A job's event log. `seq` is the attempt's own number for the event; `trim` is 1 for what may be cut from a long log.
CREATE TABLE events (
    job     TEXT NOT NULL,
    cursor  INTEGER NOT NULL,
    attempt TEXT,
    seq     INTEGER,
    trim    INTEGER NOT NULL,
    event   TEXT NOT NULL,
    PRIMARY KEY (job, cursor)
) STRICT, WITHOUT ROWID;

-- A job's files. `identity` is what makes a file the same one when its step runs twice.
CREATE TABLE artifacts (
    job      TEXT NOT NULL,
    identity TEXT NOT NULL,
    name     TEXT NOT NULL,
    artifact TEXT NOT NULL,
    PRIMARY KEY (job, identity)
) STRICT, WITHOUT ROWID;
