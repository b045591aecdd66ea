-- How large what somebody sent is; empty for what an older version noted, until the storage is looked through.
ALTER TABLE uploads ADD COLUMN bytes BIGINT;
