-- Spans, each once, even when a foreign sender exported it twice.
-- run_id and step stand in the partition so that a filter on them is applied before the window.
CREATE OR REPLACE VIEW v_spans AS
SELECT * FROM otel_spans QUALIFY row_number() OVER (PARTITION BY run_id, step, trace_id, span_id ORDER BY ingest_ns DESC) = 1;
