-- Who sent which blob: only they may name it. Gone with the blob.
CREATE TABLE uploads (
    who  TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (who, hash)
) STRICT, WITHOUT ROWID;
CREATE INDEX uploads_by_hash ON uploads (hash);
