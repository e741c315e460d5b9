-- Which schema version this file has. One row; written with the tables and checked before anything else is read.
-- views_hash says which tables, macros and views it holds, as the last collector left them.
CREATE TABLE schema_meta (
  version INTEGER NOT NULL, rlinsight_version VARCHAR NOT NULL, created_ns BIGINT NOT NULL, views_hash VARCHAR
);
