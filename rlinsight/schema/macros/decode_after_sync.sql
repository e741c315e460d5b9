-- Does a weight sync slow decoding down? Per version and replica, tokens per second of the requests that began within soon_s seconds
-- after the sync, beside later ones and beside the replica's median over the run. slow: under 0.7 of the later ones, or of the
-- median where there are none.
-- Example: FROM decode_after_sync('my-run', soon_s := 30) WHERE slow;
CREATE OR REPLACE MACRO decode_after_sync(run, soon_s := 60) AS TABLE
WITH syncs AS (
  SELECT DISTINCT attempt, replica, policy_version, step, end_ns FROM weight_syncs WHERE run_id = run
), rates AS (
  SELECT attempt, replica, start_ns, output_tokens / nullif(decode_s, 0) AS rate FROM turn_requests WHERE run_id = run AND decode_s > 0
), usual AS (SELECT replica, median(rate) AS rate FROM rates GROUP BY replica),
measured AS (
  SELECT y.step, y.policy_version, y.replica, avg(r.rate) FILTER (r.start_ns - y.end_ns < soon_s * 1e9) AS soon,
    avg(r.rate) FILTER (r.start_ns - y.end_ns >= soon_s * 1e9) AS later
  FROM rates r ASOF JOIN syncs y ON y.attempt = r.attempt AND y.replica = r.replica AND r.start_ns >= y.end_ns
  GROUP BY ALL
)
SELECT m.step, m.policy_version, m.replica, m.soon AS soon_tokens_per_s, m.later AS later_tokens_per_s, u.rate AS usual_tokens_per_s,
  m.soon < 0.7 * coalesce(m.later, u.rate) AS slow
FROM measured m JOIN usual u ON u.replica = m.replica ORDER BY m.policy_version, m.replica;
