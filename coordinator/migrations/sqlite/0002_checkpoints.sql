-- Which checkpoints a job committed, so that retention need not read event logs.
CREATE TABLE checkpoints (
    job      TEXT NOT NULL,
    cursor   INTEGER NOT NULL,
    manifest TEXT NOT NULL,
    PRIMARY KEY (job, cursor)
) STRICT, WITHOUT ROWID;

INSERT INTO checkpoints (job, cursor, manifest)
SELECT job, cursor, json_extract(event, '$.manifest') FROM events WHERE json_extract(event, '$.event') = 'checkpoint';

-- The blob of an artifact, for whoever asks which job a blob belongs to.
ALTER TABLE artifacts ADD COLUMN hash TEXT;
UPDATE artifacts SET hash = json_extract(artifact, '$.hash');
CREATE INDEX artifacts_by_hash ON artifacts (hash);
