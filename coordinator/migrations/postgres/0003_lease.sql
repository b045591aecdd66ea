-- Who leads. The leader renews it all the time; when it has run out, another coordinator may take over. It only says when to
-- try: what is written is guarded by the epoch in `writer`. A table of its own, so that renewing never waits for a commit.
CREATE TABLE lease (
    id      BIGINT PRIMARY KEY CHECK (id = 1),
    epoch   BIGINT NOT NULL,
    until   TIMESTAMPTZ NOT NULL,
    -- Where the others reach it. NULL: it wants no others beside it.
    address TEXT,
    -- What the others show with a call that they pass on.
    proof   TEXT NOT NULL,
    -- SHA-256 of the token in its data folder, and its object storage: the others must have the same.
    token   TEXT NOT NULL,
    storage TEXT NOT NULL
);
INSERT INTO lease (id, epoch, until, address, proof, token, storage) VALUES (1, 0, '-infinity', NULL, '', '', '');
