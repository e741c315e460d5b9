-- Is the telemetry of a run whole? Every join of v_linkage, and per producer what it emitted beside what is stored.
-- For a run that has ended, whatever is below 1 is lost or was refused, in full or in part.
CREATE OR REPLACE VIEW completeness AS
SELECT run_id, edge, n, linked, fraction FROM v_linkage
UNION ALL
SELECT run_id, concat('emitted->stored ', service_name, '/', rank), emitted, emitted - missing - dropped - refused,
  (emitted - missing - dropped - refused) / nullif(emitted, 0)
FROM health WHERE run_id IS NOT NULL AND emitted IS NOT NULL;
