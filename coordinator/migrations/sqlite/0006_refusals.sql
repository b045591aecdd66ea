-- What was refused may be removed when it is old; what was done stays for ever.
DROP TRIGGER audit_is_not_cut;
CREATE TRIGGER audit_is_not_cut BEFORE DELETE ON audit
WHEN json_extract(OLD.record, '$.done') IS NOT 0 BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
