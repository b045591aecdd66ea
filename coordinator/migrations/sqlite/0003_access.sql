-- Tokens and the like: what an administrator makes, as JSON by kind and id.
CREATE TABLE documents (
    kind   TEXT NOT NULL,
    id     TEXT NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT, WITHOUT ROWID;

-- Who did what. Lines are only ever added; the id is there for a commit that is tried again.
CREATE TABLE audit (
    seq    INTEGER PRIMARY KEY AUTOINCREMENT,
    id     TEXT NOT NULL UNIQUE,
    record TEXT NOT NULL
) STRICT;
CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
-- An INSERT OR REPLACE deletes without firing the trigger below; what is there already stays.
CREATE TRIGGER audit_is_not_replaced BEFORE INSERT ON audit
WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id OR seq = NEW.seq) BEGIN
    SELECT RAISE(IGNORE);
END;
CREATE TRIGGER audit_is_not_cut BEFORE DELETE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
