-- Configs that several jobs share, and such as are too large for one row: written in pieces, in transactions of their own,
-- before the jobs that need them. `id` is that of a job (its own part) or the key in `jobs.shared` (what it shares).
CREATE TABLE payloads (
    id    TEXT NOT NULL,
    piece INTEGER NOT NULL,
    body  TEXT NOT NULL,
    PRIMARY KEY (id, piece)
) STRICT;
ALTER TABLE jobs ADD COLUMN shared TEXT;
CREATE INDEX jobs_by_shared ON jobs (shared) WHERE shared IS NOT NULL;
