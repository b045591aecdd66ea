-- What was refused may be removed when it is old; what was done stays for ever.
DROP TRIGGER audit_stays ON audit;
CREATE TRIGGER audit_stays BEFORE UPDATE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only();
CREATE TRIGGER audit_is_not_cut BEFORE DELETE ON audit
    FOR EACH ROW WHEN ((OLD.record::json ->> 'done') IS DISTINCT FROM 'false')
    EXECUTE FUNCTION audit_is_append_only();
