-- One tool call of a rollout, from spans named "execute_tool {tool}".
CREATE TABLE tool_calls (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, tool VARCHAR, call_id VARCHAR,
  start_ns BIGINT, end_ns BIGINT, status_code TINYINT, error_type VARCHAR, trace_id VARCHAR, span_id VARCHAR
);
