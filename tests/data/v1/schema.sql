-- Schema version 1 as it shipped: its tables, macros and views. Frozen; the migration tests start from it.

-- Which schema version this file has. One row; written with the tables and checked before anything else is read.
-- views_hash says which macros and views it holds, as the last collector left them.
CREATE TABLE schema_meta (
  version INTEGER NOT NULL, rlinsight_version VARCHAR NOT NULL, created_ns BIGINT NOT NULL, views_hash VARCHAR
);

-- The ledger: one row per stored OTLP request, written in the same transaction as its rows. Foreign senders have no producer.
CREATE TABLE ingest_batches (
  batch_id VARCHAR PRIMARY KEY, producer VARCHAR, seq BIGINT, signal VARCHAR, rows BIGINT, rejected BIGINT, bytes BIGINT,
  received_ns BIGINT, committed_ns BIGINT
);

-- What a producer says it emitted, sent and dropped (cumulative), from event rlinsight.producer.health.
CREATE TABLE producer_health (
  run_id VARCHAR, attempt INTEGER, producer VARCHAR, service_name VARCHAR, rank INTEGER, time_ns BIGINT, emitted BIGINT, sent BIGINT,
  dropped_queue BIGINT, dropped_limit BIGINT,
  dropped_disk BIGINT, dropped_crash BIGINT, dropped_fault BIGINT, rejected BIGINT, retried BIGINT, queue_length BIGINT, overhead_ns BIGINT
);

-- Raw spans, one row per span as received. Times are unix nanoseconds. Promoted columns are NULL for spans that lack them.
CREATE TABLE otel_spans (
  trace_id VARCHAR NOT NULL, span_id VARCHAR NOT NULL, parent_span_id VARCHAR, trace_state VARCHAR, flags BIGINT,
  name VARCHAR NOT NULL, kind TINYINT, start_ns BIGINT NOT NULL, end_ns BIGINT NOT NULL,
  status_code TINYINT, status_message VARCHAR,
  service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR, scope_version VARCHAR,
  resource_attributes JSON, span_attributes JSON, events JSON, links JSON,
  dropped_attributes_count BIGINT, dropped_events_count BIGINT, dropped_links_count BIGINT, schema_url VARCHAR,
  run_id VARCHAR, attempt INTEGER, step BIGINT, lane VARCHAR, rank INTEGER, phase VARCHAR, bucket VARCHAR,
  group_id VARCHAR, rollout_id VARCHAR, turn_index INTEGER, request_id VARCHAR, policy_version BIGINT,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);

-- Raw log records. Byte attributes stand in log_attributes as {"bytes": length}; their content is in the token tables.
CREATE TABLE otel_logs (
  time_ns BIGINT, observed_ns BIGINT, trace_id VARCHAR, span_id VARCHAR, flags BIGINT,
  severity_number TINYINT, severity_text VARCHAR, event_name VARCHAR, body VARCHAR,
  service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR, scope_version VARCHAR,
  resource_attributes JSON, log_attributes JSON, dropped_attributes_count BIGINT, schema_url VARCHAR,
  run_id VARCHAR, attempt INTEGER, step BIGINT, rank INTEGER,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);

-- Raw metric points with their stream's identity (gauge, sum, histogram, exponential histogram, summary).
CREATE TABLE otel_metrics (
  time_ns BIGINT, start_ns BIGINT, name VARCHAR, unit VARCHAR, kind VARCHAR, temporality VARCHAR, is_monotonic BOOLEAN,
  value DOUBLE, count UBIGINT, sum DOUBLE, min DOUBLE, max DOUBLE, bounds DOUBLE[], bucket_counts UBIGINT[], detail JSON,
  attributes JSON, exemplars JSON, flags BIGINT, service_name VARCHAR, service_instance_id VARCHAR, scope_name VARCHAR,
  resource_attributes JSON, schema_url VARCHAR, run_id VARCHAR, attempt INTEGER, step BIGINT, rank INTEGER,
  batch_id VARCHAR NOT NULL, ingest_ns BIGINT NOT NULL
);

-- One row per attempt of a run, from event rlinsight.run.start.
CREATE TABLE run_starts (
  run_id VARCHAR, attempt INTEGER, time_ns BIGINT, name VARCHAR, project VARCHAR, algorithm VARCHAR, model VARCHAR,
  config JSON, config_hash VARCHAR, code_version VARCHAR, host JSON, total_steps BIGINT, resumed_from_step BIGINT
);

-- One row per attempt that ended in an orderly way, from event rlinsight.run.end.
CREATE TABLE run_ends (run_id VARCHAR, attempt INTEGER, time_ns BIGINT, status VARCHAR, exit_code INTEGER, reason VARCHAR);

-- A step-level span has begun, from event rlinsight.span.start; view open_spans shows those that have not ended.
CREATE TABLE span_starts (
  run_id VARCHAR, attempt INTEGER, step BIGINT, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, name VARCHAR,
  start_ns BIGINT, lane VARCHAR, rank INTEGER, phase VARCHAR, service_name VARCHAR
);

-- One row per step, from span rl.loop.
CREATE TABLE steps (
  run_id VARCHAR, attempt INTEGER, step BIGINT, trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, end_ns BIGINT,
  policy_version_in BIGINT, policy_version_out BIGINT, num_prompts BIGINT, num_rollouts BIGINT, num_tokens BIGINT,
  status_code TINYINT, status_message VARCHAR
);

-- One scalar of one step with its reduction stated, from event rlinsight.step.metric.
CREATE TABLE step_metrics (
  run_id VARCHAR, attempt INTEGER, step BIGINT, time_ns BIGINT, name VARCHAR, value DOUBLE, agg VARCHAR, unit VARCHAR, weight VARCHAR
);

-- One row per phase of a step, from spans that carry rlinsight.phase.
CREATE TABLE phases (
  run_id VARCHAR, attempt INTEGER, step BIGINT, phase VARCHAR, lane VARCHAR, rank INTEGER, bucket VARCHAR,
  start_ns BIGINT, end_ns BIGINT, skipped VARCHAR, trace_id VARCHAR, span_id VARCHAR, status_code TINYINT
);

-- One engine received one weight version, from span rl.weight_sync.
CREATE TABLE weight_syncs (
  run_id VARCHAR, attempt INTEGER, step BIGINT, policy_version BIGINT, engine VARCHAR, replica VARCHAR, start_ns BIGINT,
  end_ns BIGINT, bytes BIGINT, refreshed_bytes BIGINT, span_id VARCHAR, status_code TINYINT
);

-- One row per group (prompt dispatched in a step), from event rlinsight.group.
CREATE TABLE group_prompts (
  run_id VARCHAR, attempt INTEGER, step BIGINT, group_id VARCHAR, prompt_id VARCHAR, data_source VARCHAR, group_size INTEGER,
  prompt_text VARCHAR, answer VARCHAR, time_ns BIGINT
);

-- How a rollout was sampled, from span rl.rollout.
CREATE TABLE rollout_samples (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, group_id VARCHAR, prompt_id VARCHAR, sample_index INTEGER,
  trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, end_ns BIGINT, policy_version_min BIGINT, policy_version_max BIGINT,
  status VARCHAR, finish_reason VARCHAR, prompt_tokens BIGINT, response_tokens BIGINT
);

-- The reward a rollout is learned from, from event rlinsight.rollout.scored.
CREATE TABLE rollout_scores (
  run_id VARCHAR, attempt INTEGER, rollout_id VARCHAR, reward DOUBLE, status VARCHAR, reason VARCHAR, time_ns BIGINT
);

-- A turn as an update consumed it, from event rl.rollout.trained. Lists align with token_runs.token_ids of the turn.
CREATE TABLE rollout_training (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, policy_version BIGINT, advantage DOUBLE,
  loss_mask BOOLEAN[], old_log_probs FLOAT[], log_probs FLOAT[], ref_log_probs FLOAT[], entropy FLOAT[], advantages FLOAT[],
  clipped BOOLEAN[], time_ns BIGINT
);

-- One reward component of one rollout, from event gen_ai.evaluation.result.
CREATE TABLE rewards (
  run_id VARCHAR, attempt INTEGER, rollout_id VARCHAR, component VARCHAR, weight DOUBLE, value DOUBLE, label VARCHAR,
  explanation VARCHAR, latency_s DOUBLE, time_ns BIGINT
);

-- One engine request of a rollout, from spans named "chat {model}".
CREATE TABLE turns (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, request_id VARCHAR, engine VARCHAR,
  replica VARCHAR, trace_id VARCHAR, span_id VARCHAR, start_ns BIGINT, end_ns BIGINT, prompt_tokens BIGINT,
  cached_tokens BIGINT, output_tokens BIGINT, finish_reason VARCHAR, policy_version BIGINT
);

-- Texts and per-token lists of one turn as sampled, from event rlinsight.turn.content. Lists have one entry per sampled token.
CREATE TABLE token_runs (
  run_id VARCHAR, attempt INTEGER, step BIGINT, rollout_id VARCHAR, turn_index INTEGER, trace_id VARCHAR, prompt_text VARCHAR,
  response_text VARCHAR, prompt_token_ids INTEGER[], token_ids INTEGER[], token_pieces VARCHAR[], rollout_log_probs FLOAT[],
  time_ns BIGINT
);

-- Unix nanoseconds to a UTC TIMESTAMP: to_time(start_ns).
CREATE OR REPLACE MACRO to_time(ns) AS make_timestamp(ns // 1000);

-- Wall clock in unix nanoseconds, comparable to every *_ns column: now_ns() - start_ns.
CREATE OR REPLACE MACRO now_ns() AS epoch_us(now()) * 1000;

-- How many intervals of a relation with start_ns and end_ns are open at each moment: from ts for dur nanoseconds, n of them.
CREATE OR REPLACE MACRO intervals_overlap_count(intervals) AS TABLE
WITH edges AS (
  SELECT start_ns AS ts, 1 AS delta FROM query_table(intervals)
  UNION ALL
  SELECT end_ns, -1 FROM query_table(intervals) WHERE end_ns IS NOT NULL
), moments AS (SELECT ts, sum(delta) AS delta FROM edges GROUP BY ts)
SELECT ts, CAST(sum(delta) OVER (ORDER BY ts) AS BIGINT) AS n, lead(ts) OVER (ORDER BY ts) - ts AS dur FROM moments;

-- Overlapping parts of two relations with id, start_ns and end_ns, one row per pair that overlaps.
CREATE OR REPLACE MACRO intervals_intersect(a, b) AS TABLE
SELECT x.id AS a_id, y.id AS b_id, greatest(x.start_ns, y.start_ns) AS start_ns, least(x.end_ns, y.end_ns) AS end_ns
FROM query_table(a) x JOIN query_table(b) y ON x.start_ns < y.end_ns AND y.start_ns < x.end_ns;

-- Which steps of an attempt count: those up to valid_through_step; all of them when it is NULL.
-- A resume continues from a checkpoint, so what earlier attempts did after that checkpoint is not part of the run any more.
CREATE OR REPLACE VIEW lineage AS
WITH starts AS (
  SELECT run_id, attempt, max(coalesce(resumed_from_step, 0)) AS resumed_from FROM run_starts GROUP BY run_id, attempt
)
SELECT run_id, attempt,
  min(resumed_from) OVER (
    PARTITION BY run_id ORDER BY attempt ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING
  ) AS valid_through_step
FROM starts;

-- Every start of every run: when, from which checkpoint, how it ended, and when it was last heard of.
-- status: what the run reported at its end; else running while some process was heard of in the last minute; else lost
-- (killed, or its telemetry has not arrived). An attempt that was followed by another one is never running.
CREATE OR REPLACE VIEW attempts AS
WITH starts AS (
  SELECT run_id, attempt, min(time_ns) AS started_ns, arg_max(name, time_ns) AS name, arg_max(project, time_ns) AS project,
    arg_max(algorithm, time_ns) AS algorithm, arg_max(model, time_ns) AS model, arg_max(config, time_ns) AS config,
    arg_max(config_hash, time_ns) AS config_hash, arg_max(code_version, time_ns) AS code_version,
    arg_max(host, time_ns) AS host, arg_max(total_steps, time_ns) AS total_steps,
    arg_max(resumed_from_step, time_ns) AS resumed_from_step
  FROM run_starts GROUP BY run_id, attempt
), ends AS (
  SELECT run_id, attempt, max(time_ns) AS ended_ns, arg_max(status, time_ns) AS status, arg_max(exit_code, time_ns) AS exit_code,
    arg_max(reason, time_ns) AS reason
  FROM run_ends GROUP BY run_id, attempt
), heard AS (
  SELECT run_id, attempt, max(ns) AS last_seen_ns, min(first_ns) AS first_seen_ns FROM (
    SELECT run_id, attempt, max(time_ns) AS ns, min(time_ns) AS first_ns FROM producer_health GROUP BY ALL
    UNION ALL SELECT run_id, attempt, max(end_ns), min(start_ns) FROM steps GROUP BY ALL
    UNION ALL SELECT run_id, attempt, max(end_ns), min(start_ns) FROM phases GROUP BY ALL
    UNION ALL SELECT run_id, attempt, max(start_ns), min(start_ns) FROM span_starts GROUP BY ALL
    UNION ALL SELECT run_id, attempt, started_ns, started_ns FROM starts
    UNION ALL SELECT run_id, attempt, ended_ns, ended_ns FROM ends
  ) WHERE run_id IS NOT NULL GROUP BY run_id, attempt
)
SELECT h.run_id, h.attempt, s.name, s.project, s.algorithm, s.model,
  CASE
    WHEN e.run_id IS NOT NULL THEN e.status
    WHEN h.attempt = max(h.attempt) OVER (PARTITION BY h.run_id) AND now_ns() - h.last_seen_ns < 60e9 THEN 'running'
    ELSE 'lost'
  END AS status,
  to_time(coalesce(s.started_ns, h.first_seen_ns)) AS started, to_time(e.ended_ns) AS ended, to_time(h.last_seen_ns) AS last_seen,
  (coalesce(e.ended_ns, h.last_seen_ns) - coalesce(s.started_ns, h.first_seen_ns)) / 1e9 AS duration_s,
  s.resumed_from_step, l.valid_through_step, s.total_steps, e.exit_code, e.reason, s.config, s.config_hash, s.code_version, s.host,
  coalesce(s.started_ns, h.first_seen_ns) AS started_ns, e.ended_ns, h.last_seen_ns
FROM heard h
LEFT JOIN starts s ON s.run_id = h.run_id AND s.attempt = h.attempt
LEFT JOIN ends e ON e.run_id = h.run_id AND e.attempt = h.attempt
LEFT JOIN lineage l ON l.run_id = h.run_id AND l.attempt = h.attempt;

-- One row per finished step of a run; one that failed or was abandoned (status_code 2 in table steps) is not among them.
-- Steps redone after a resume count once, as the latest attempt did them.
CREATE OR REPLACE VIEW v_steps AS
SELECT s.run_id, s.attempt, s.step, to_time(s.start_ns) AS started, (s.end_ns - s.start_ns) / 1e9 AS duration_s,
  s.policy_version_in, s.policy_version_out, s.num_prompts, s.num_rollouts, s.num_tokens, s.status_code, s.status_message,
  s.trace_id, s.span_id, s.start_ns, s.end_ns
FROM steps s LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
WHERE (l.valid_through_step IS NULL OR s.step <= l.valid_through_step) AND s.status_code IS DISTINCT FROM 2
QUALIFY row_number() OVER (PARTITION BY s.run_id, s.step ORDER BY s.attempt DESC, s.end_ns DESC) = 1;

-- One row per run: what it is, how far it got, how it stands. Settings and status are those of its latest attempt.
CREATE OR REPLACE VIEW runs AS
WITH latest AS (
  SELECT *, count(*) OVER (PARTITION BY run_id) AS attempts, min(started_ns) OVER (PARTITION BY run_id) AS first_started_ns
  FROM attempts QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY attempt DESC) = 1
), done AS (
  SELECT run_id, count(*) AS steps_done, max(step) AS last_step FROM v_steps GROUP BY run_id
), reward AS (
  SELECT m.run_id, arg_max(m.value, (m.step, m.attempt, m.time_ns)) AS last_reward
  FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE m.name = 'reward/mean' AND (l.valid_through_step IS NULL OR m.step <= l.valid_through_step) GROUP BY m.run_id
)
SELECT a.run_id, a.name, a.project, a.algorithm, a.model, a.status, a.attempts, to_time(a.first_started_ns) AS started, a.ended,
  a.last_seen, (coalesce(a.ended_ns, a.last_seen_ns) - a.first_started_ns) / 1e9 AS duration_s,
  coalesce(d.steps_done, 0) AS steps_done, d.last_step, a.total_steps, r.last_reward, a.exit_code, a.reason,
  a.config, a.config_hash, a.code_version, a.host, a.first_started_ns AS started_ns, a.ended_ns
FROM latest a LEFT JOIN done d ON d.run_id = a.run_id LEFT JOIN reward r ON r.run_id = a.run_id;

-- One row per step with every step metric as a column; a metric that was not reported is NULL.
-- Column names: policy/, optim/ and perf/ are dropped, other slashes become underscores (reward/mean is reward_mean).
-- Metrics of your own are in table step_metrics. Steps redone after a resume count once, as the latest attempt did them.
CREATE OR REPLACE VIEW train_metrics AS
WITH current AS (
  SELECT m.* FROM step_metrics m LEFT JOIN lineage l ON l.run_id = m.run_id AND l.attempt = m.attempt
  WHERE l.valid_through_step IS NULL OR m.step <= l.valid_through_step
), wide AS (
  SELECT run_id, attempt, step,
    arg_max(value, time_ns) FILTER (name = 'reward/mean') AS reward_mean,
    arg_max(value, time_ns) FILTER (name = 'reward/std') AS reward_std,
    arg_max(value, time_ns) FILTER (name = 'reward/max') AS reward_max,
    arg_max(value, time_ns) FILTER (name = 'reward/min') AS reward_min,
    arg_max(value, time_ns) FILTER (name = 'reward/zero_variance_groups') AS reward_zero_variance_groups,
    arg_max(value, time_ns) FILTER (name = 'advantage/abs_mean') AS advantage_abs_mean,
    arg_max(value, time_ns) FILTER (name = 'response_length/mean') AS response_length_mean,
    arg_max(value, time_ns) FILTER (name = 'response_length/max') AS response_length_max,
    arg_max(value, time_ns) FILTER (name = 'response_length/truncated') AS response_length_truncated,
    arg_max(value, time_ns) FILTER (name = 'prompt_length/mean') AS prompt_length_mean,
    arg_max(value, time_ns) FILTER (name = 'policy/entropy') AS entropy,
    arg_max(value, time_ns) FILTER (name = 'policy/rollout_kl') AS rollout_kl,
    arg_max(value, time_ns) FILTER (name = 'policy/rollout_log_prob_gap') AS rollout_log_prob_gap,
    arg_max(value, time_ns) FILTER (name = 'policy/rollout_log_prob_gap_max') AS rollout_log_prob_gap_max,
    arg_max(value, time_ns) FILTER (name = 'policy/num_mismatched_tokens') AS num_mismatched_tokens,
    arg_max(value, time_ns) FILTER (name = 'policy/policy_kl') AS policy_kl,
    arg_max(value, time_ns) FILTER (name = 'policy/ref_kl') AS ref_kl,
    arg_max(value, time_ns) FILTER (name = 'policy/clip_fraction') AS clip_fraction,
    arg_max(value, time_ns) FILTER (name = 'policy/ratio_max') AS ratio_max,
    arg_max(value, time_ns) FILTER (name = 'loss/total') AS loss_total,
    arg_max(value, time_ns) FILTER (name = 'loss/policy') AS loss_policy,
    arg_max(value, time_ns) FILTER (name = 'loss/kl') AS loss_kl,
    arg_max(value, time_ns) FILTER (name = 'optim/grad_norm') AS grad_norm,
    arg_max(value, time_ns) FILTER (name = 'optim/learning_rate') AS learning_rate,
    arg_max(value, time_ns) FILTER (name = 'optim/weights_changed') AS weights_changed,
    arg_max(value, time_ns) FILTER (name = 'policy/staleness') AS staleness,
    arg_max(value, time_ns) FILTER (name = 'perf/tokens_per_s') AS tokens_per_s,
    arg_max(value, time_ns) FILTER (name = 'perf/samples_per_s') AS samples_per_s,
    arg_max(value, time_ns) FILTER (name = 'perf/generation_tokens_per_s') AS generation_tokens_per_s
  FROM current GROUP BY run_id, attempt, step
  QUALIFY row_number() OVER (PARTITION BY run_id, step ORDER BY attempt DESC) = 1
)
SELECT w.*, s.duration_s AS step_s, s.started, s.num_rollouts, s.num_tokens, s.policy_version_in, s.policy_version_out, s.trace_id
FROM wide w LEFT JOIN v_steps s ON s.run_id = w.run_id AND s.attempt = w.attempt AND s.step = w.step;

-- One row per group: its prompt and what its rollouts earned. signal says whether the group teaches anything:
-- all_pass and all_fail have equal rewards, hence zero advantages (all_pass when that reward is above 0); mixed is useful.
-- NULL until a rollout is scored. Groups of steps redone after a resume are left out.
CREATE OR REPLACE VIEW groups AS
WITH prompts AS (
  SELECT * FROM group_prompts
  QUALIFY row_number() OVER (PARTITION BY run_id, attempt, group_id ORDER BY time_ns DESC) = 1
), samples AS (
  SELECT run_id, attempt, group_id, rollout_id, max(response_tokens) AS response_tokens,
    max(CAST(finish_reason = 'length' AS INTEGER)) AS truncated
  FROM rollout_samples GROUP BY run_id, attempt, group_id, rollout_id
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward FROM rollout_scores GROUP BY run_id, attempt, rollout_id
), earned AS (
  SELECT s.run_id, s.attempt, s.group_id, count(*) AS num_rollouts, count(c.reward) AS num_scored, avg(c.reward) AS reward_mean,
    stddev_pop(c.reward) AS reward_std, min(c.reward) AS reward_min, max(c.reward) AS reward_max,
    avg(s.response_tokens) AS response_tokens_mean, CAST(sum(s.truncated) AS BIGINT) AS num_truncated
  FROM samples s
  LEFT JOIN scores c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.rollout_id = s.rollout_id
  GROUP BY s.run_id, s.attempt, s.group_id
)
SELECT p.run_id, p.attempt, p.step, p.group_id, p.prompt_id, p.data_source, p.group_size, coalesce(e.num_rollouts, 0) AS num_rollouts,
  coalesce(e.num_scored, 0) AS num_scored, e.reward_mean, e.reward_std, e.reward_min, e.reward_max,
  e.reward_min = e.reward_max AS zero_variance,
  CASE WHEN e.reward_min < e.reward_max THEN 'mixed' WHEN e.reward_max > 0 THEN 'all_pass' WHEN e.reward_max <= 0 THEN 'all_fail' END
    AS signal,
  e.response_tokens_mean, e.num_truncated, p.prompt_text, p.answer, p.time_ns
FROM prompts p
LEFT JOIN lineage l ON l.run_id = p.run_id AND l.attempt = p.attempt
LEFT JOIN earned e ON e.run_id = p.run_id AND e.attempt = p.attempt AND e.group_id = p.group_id
WHERE l.valid_through_step IS NULL OR p.step <= l.valid_through_step;

-- One row per rollout: how it was sampled, scored and trained on, with its texts. Columns of what has not happened are NULL.
-- staleness: the trainer's policy_version when it consumed the rollout minus the oldest weights that sampled it.
-- Rollouts of steps redone after a resume are left out.
CREATE OR REPLACE VIEW rollouts AS
WITH samples AS (
  SELECT * FROM rollout_samples
  QUALIFY row_number() OVER (PARTITION BY run_id, attempt, rollout_id ORDER BY end_ns DESC) = 1
), scores AS (
  SELECT run_id, attempt, rollout_id, arg_max(reward, time_ns) AS reward, arg_max(status, time_ns) AS score_status,
    arg_max(reason, time_ns) AS score_reason
  FROM rollout_scores GROUP BY run_id, attempt, rollout_id
), prompts AS (
  SELECT run_id, attempt, group_id, arg_max(data_source, time_ns) AS data_source, arg_max(answer, time_ns) AS answer
  FROM group_prompts GROUP BY run_id, attempt, group_id
), texts AS (
  SELECT run_id, attempt, rollout_id, arg_min(prompt_text, turn_index) AS prompt_text,
    -- The turns' texts in order: sorting each small list costs a third of string_agg(... ORDER BY turn_index).
    array_to_string(list_transform(list_sort(list({t: turn_index, r: response_text})), lambda turn: turn.r), '')
      AS response_text,
    count(DISTINCT turn_index) AS num_turns
  FROM token_runs GROUP BY run_id, attempt, rollout_id
), training AS (
  SELECT run_id, attempt, rollout_id, max(step) AS step_trained, max(policy_version) AS policy_version_trained,
    max(advantage) AS advantage, CAST(sum(list_aggregate(loss_mask, 'count_if')) AS BIGINT) AS loss_tokens,
    CAST(sum(list_aggregate(clipped, 'count_if')) AS BIGINT) AS clipped_tokens
  FROM rollout_training GROUP BY run_id, attempt, rollout_id
)
SELECT s.run_id, s.attempt, s.step, t.step_trained, s.rollout_id, s.group_id, s.prompt_id, p.data_source, s.sample_index,
  s.status, s.finish_reason, c.reward, c.score_status, c.score_reason, t.advantage, s.prompt_tokens, s.response_tokens,
  x.num_turns, t.loss_tokens, t.clipped_tokens, s.policy_version_min, s.policy_version_max, t.policy_version_trained,
  t.policy_version_trained - s.policy_version_min AS staleness, (s.end_ns - s.start_ns) / 1e9 AS duration_s,
  x.prompt_text, x.response_text, p.answer, s.trace_id, s.span_id, s.start_ns, s.end_ns
FROM samples s
LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
LEFT JOIN scores c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.rollout_id = s.rollout_id
LEFT JOIN prompts p ON p.run_id = s.run_id AND p.attempt = s.attempt AND p.group_id = s.group_id
LEFT JOIN texts x ON x.run_id = s.run_id AND x.attempt = s.attempt AND x.rollout_id = s.rollout_id
LEFT JOIN training t ON t.run_id = s.run_id AND t.attempt = s.attempt AND t.rollout_id = s.rollout_id
WHERE l.valid_through_step IS NULL OR s.step <= l.valid_through_step;

-- One row per sampled token, with every log-prob known of it. pos counts from 0 inside the turn.
-- step is the step that sampled the token. Training columns are NULL until an update consumed the turn.
-- Give run_id and step or rollout_id: the lists are unnested after the filter. Turns sent twice by a foreign sender show twice.
CREATE OR REPLACE VIEW tokens AS
WITH turns_joined AS (
  SELECT r.run_id, r.attempt, r.step, r.rollout_id, r.turn_index, t.step AS step_trained, r.token_ids, r.token_pieces,
    r.rollout_log_probs, t.old_log_probs, t.log_probs, t.ref_log_probs, t.entropy, t.advantages, t.loss_mask, t.clipped
  FROM token_runs r
  LEFT JOIN lineage l ON l.run_id = r.run_id AND l.attempt = r.attempt
  LEFT JOIN rollout_training t
    ON t.run_id = r.run_id AND t.attempt = r.attempt AND t.rollout_id = r.rollout_id AND t.turn_index = r.turn_index
  WHERE l.valid_through_step IS NULL OR r.step <= l.valid_through_step
)
SELECT run_id, attempt, step, rollout_id, turn_index, step_trained, unnest(range(len(token_ids))) AS pos,
  unnest(token_ids) AS token_id, unnest(token_pieces) AS piece, unnest(rollout_log_probs) AS rollout_log_prob,
  unnest(old_log_probs) AS old_log_prob, unnest(log_probs) AS log_prob, unnest(ref_log_probs) AS ref_log_prob,
  unnest(entropy) AS entropy, unnest(advantages) AS advantage, unnest(loss_mask) AS in_loss, unnest(clipped) AS clipped
FROM turns_joined;

-- Spans, each once, even when a foreign sender exported it twice.
-- run_id and step stand in the partition so that a filter on them is applied before the window.
CREATE OR REPLACE VIEW v_spans AS
SELECT * FROM otel_spans QUALIFY row_number() OVER (PARTITION BY run_id, step, trace_id, span_id ORDER BY ingest_ns DESC) = 1;

-- What is going on right now: spans that began and have not ended, oldest first, with their age.
-- Only of attempts that have not reported their end. status running: the run is alive; lost: it was not heard of for a minute, so this is
-- what it was doing when it went silent.
CREATE OR REPLACE VIEW open_spans AS
WITH live AS (
  SELECT run_id, attempt, status, last_seen_ns FROM attempts WHERE status IN ('running', 'lost')
  QUALIFY attempt = max(attempt) OVER (PARTITION BY run_id)
), ended AS (
  SELECT o.trace_id, o.span_id FROM otel_spans o JOIN live v ON v.run_id = o.run_id AND v.attempt = o.attempt
)
SELECT DISTINCT s.run_id, s.attempt, s.step, s.name, s.phase, s.lane, s.rank, v.status, to_time(s.start_ns) AS started,
  (CASE v.status WHEN 'running' THEN now_ns() ELSE v.last_seen_ns END - s.start_ns) / 1e9 AS age_s,
  s.service_name, s.trace_id, s.span_id, s.parent_span_id, s.start_ns
FROM span_starts s JOIN live v ON v.run_id = s.run_id AND v.attempt = s.attempt
ANTI JOIN ended e ON e.trace_id = s.trace_id AND e.span_id = s.span_id
ORDER BY s.start_ns;

-- What every process did when: one row per span that has a lane, and per span still open (end_ns NULL).
-- Give run_id and step. Rollouts and their turns have their own traces; everything else hangs under the step's rl.loop span.
-- Spans of steps redone after a resume are left out.
CREATE OR REPLACE VIEW timeline AS
WITH spans AS (
  SELECT run_id, attempt, step, lane, name, phase, span_attributes ->> '$."rlinsight.worker.method"' AS method, bucket, start_ns, end_ns,
    status_code, rollout_id, turn_index, trace_id, span_id, parent_span_id, service_name
  FROM v_spans WHERE lane IS NOT NULL
  UNION ALL
  SELECT run_id, attempt, step, lane, name, phase, NULL, NULL, start_ns, NULL, NULL, NULL, NULL, trace_id, span_id, parent_span_id,
    service_name
  FROM open_spans WHERE lane IS NOT NULL
)
SELECT s.run_id, s.attempt, s.step, s.lane, s.name, s.phase, s.method, s.bucket, to_time(s.start_ns) AS started,
  (s.end_ns - s.start_ns) / 1e9 AS duration_s, s.start_ns, s.end_ns, s.status_code = 2 AS failed, s.rollout_id, s.turn_index,
  s.trace_id, s.span_id, s.parent_span_id, s.service_name
FROM spans s LEFT JOIN lineage l ON l.run_id = s.run_id AND l.attempt = s.attempt
WHERE l.valid_through_step IS NULL OR s.step IS NULL OR s.step <= l.valid_through_step;

-- Do the phases explain the step? Wall time, the part of it covered by at least one phase, and the unattributed rest.
-- Phases that overlap are counted once. Steps redone after a resume count as the latest attempt did them.
CREATE OR REPLACE VIEW v_phase_coverage AS
WITH clipped AS (
  SELECT s.run_id, s.attempt, s.step, greatest(p.start_ns, s.start_ns) AS start_ns, least(p.end_ns, s.end_ns) AS end_ns
  FROM v_steps s JOIN phases p ON p.run_id = s.run_id AND p.attempt = s.attempt AND p.step = s.step
  WHERE p.start_ns < s.end_ns AND p.end_ns > s.start_ns
), fresh AS (
  SELECT run_id, step, end_ns - greatest(start_ns, coalesce(max(end_ns) OVER (
    PARTITION BY run_id, step ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)) AS ns
  FROM clipped
), covered AS (SELECT run_id, step, sum(greatest(ns, 0)) AS ns FROM fresh GROUP BY run_id, step)
SELECT s.run_id, s.attempt, s.step, s.duration_s, coalesce(c.ns, 0) / 1e9 AS covered_s,
  s.duration_s - coalesce(c.ns, 0) / 1e9 AS unattributed_s, coalesce(c.ns, 0) / nullif(s.end_ns - s.start_ns, 0) AS fraction
FROM v_steps s LEFT JOIN covered c ON c.run_id = s.run_id AND c.step = s.step;

-- How complete are the joins? Per run and edge: n rows on the left, how many of them find their partner, and the fraction.
-- While a run is live, what is still travelling counts as not linked; a finished run should show 1 on every line.
-- rollout->reward, rollout->training and step->metrics are about steps that finished: one that was abandoned or failed owes
-- none of them.
-- span_start->span is about spans that should have ended: those of attempts that reported their end.
CREATE OR REPLACE VIEW v_linkage AS
WITH known_steps AS (
  SELECT run_id, attempt, step FROM steps UNION SELECT run_id, attempt, step FROM span_starts WHERE name = 'rl.loop'
), finished AS (
  SELECT DISTINCT run_id, attempt, step FROM steps WHERE status_code IS DISTINCT FROM 2
), due AS (
  FROM rollout_samples SEMI JOIN finished USING (run_id, attempt, step)
), sampled AS (SELECT DISTINCT run_id, attempt, rollout_id FROM rollout_samples),
scored AS (SELECT DISTINCT run_id, attempt, rollout_id FROM rollout_scores),
trained AS (SELECT DISTINCT run_id, attempt, rollout_id FROM rollout_training),
prompts AS (SELECT DISTINCT run_id, attempt, group_id FROM group_prompts),
contents AS (SELECT DISTINCT run_id, attempt, rollout_id, turn_index FROM token_runs),
with_text AS (SELECT DISTINCT run_id, attempt, rollout_id FROM token_runs),
with_turn AS (SELECT DISTINCT run_id, attempt, rollout_id FROM turns),
measured AS (SELECT DISTINCT run_id, attempt, step FROM step_metrics),
closed AS (
  SELECT DISTINCT s.run_id, s.attempt, s.trace_id, s.span_id FROM span_starts s
  SEMI JOIN run_ends e ON e.run_id = s.run_id AND e.attempt = s.attempt
), edges AS (
  SELECT r.run_id, 'rollout->step' AS edge, count(*) AS n, count(k.step) AS linked
  FROM rollout_samples r LEFT JOIN known_steps k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.step = r.step GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->group', count(*), count(k.group_id)
  FROM rollout_samples r LEFT JOIN prompts k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.group_id = r.group_id
  GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->tokens', count(*), count(k.rollout_id)
  FROM rollout_samples r LEFT JOIN with_text k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id
  GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->spans', count(*), count(k.rollout_id)
  FROM rollout_samples r LEFT JOIN with_turn k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id
  GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->reward', count(*), count(k.rollout_id)
  FROM due r LEFT JOIN scored k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id GROUP BY r.run_id
  UNION ALL
  SELECT r.run_id, 'rollout->training', count(*), count(k.rollout_id)
  FROM due r LEFT JOIN trained k ON k.run_id = r.run_id AND k.attempt = r.attempt AND k.rollout_id = r.rollout_id GROUP BY r.run_id
  UNION ALL
  SELECT t.run_id, 'turn->rollout', count(*), count(k.rollout_id)
  FROM turns t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'tokens->rollout', count(*), count(k.rollout_id)
  FROM token_runs t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id
  GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'reward->rollout', count(*), count(k.rollout_id)
  FROM rewards t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'training->rollout', count(*), count(k.rollout_id)
  FROM rollout_training t LEFT JOIN sampled k ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id
  GROUP BY t.run_id
  UNION ALL
  SELECT t.run_id, 'training->tokens', count(*), count(k.rollout_id)
  FROM rollout_training t
  LEFT JOIN contents k
    ON k.run_id = t.run_id AND k.attempt = t.attempt AND k.rollout_id = t.rollout_id AND k.turn_index = t.turn_index
  GROUP BY t.run_id
  UNION ALL
  SELECT p.run_id, 'phase->step', count(*), count(k.step)
  FROM phases p LEFT JOIN known_steps k ON k.run_id = p.run_id AND k.attempt = p.attempt AND k.step = p.step GROUP BY p.run_id
  UNION ALL
  SELECT s.run_id, 'step->metrics', count(*), count(m.step)
  FROM finished s LEFT JOIN measured m ON m.run_id = s.run_id AND m.attempt = s.attempt AND m.step = s.step GROUP BY s.run_id
  UNION ALL
  SELECT s.run_id, 'span_start->span', count(*), count(o.span_id)
  FROM closed s LEFT JOIN (SELECT DISTINCT trace_id, span_id FROM otel_spans SEMI JOIN run_ends USING (run_id, attempt)) o
    ON o.trace_id = s.trace_id AND o.span_id = s.span_id
  GROUP BY s.run_id
)
SELECT run_id, edge, n, linked, linked / n AS fraction FROM edges WHERE run_id IS NOT NULL;

-- Is the telemetry complete? One row per producer: what it says it emitted and dropped, and what is stored of it.
-- refused: items the collector could not take, or not in full; alone or with their whole batch, which then has no ledger row.
-- missing: emitted, not dropped, not refused with their batch and not stored yet; above 0 for a moment while batches travel.
-- Senders that do not identify themselves share the row with producer NULL; they report nothing, so only stored is known.
CREATE OR REPLACE VIEW health AS
WITH said AS (
  -- Only the report written for a killed producer knows dropped_crash; a living one has lost nothing that way.
  SELECT * REPLACE (coalesce(dropped_crash, 0) AS dropped_crash) FROM producer_health QUALIFY row_number() OVER (PARTITION BY producer ORDER BY time_ns DESC) = 1
), stored AS (
  SELECT producer, count(*) AS batches, sum(rows) AS rows, sum(rejected) AS rejected, sum(bytes) AS bytes, max(committed_ns) AS last_ns
  FROM ingest_batches GROUP BY producer
)
SELECT h.run_id, h.attempt, coalesce(h.producer, s.producer) AS producer, h.service_name, h.rank, h.emitted, h.sent,
  CAST(coalesce(s.rows, 0) AS BIGINT) AS stored, CAST(greatest(coalesce(s.rejected, 0), coalesce(h.rejected, 0)) AS BIGINT) AS refused,
  h.dropped_queue, h.dropped_limit, h.dropped_disk, h.dropped_crash, h.dropped_fault,
  h.dropped_queue + h.dropped_limit + h.dropped_disk + h.dropped_crash + h.dropped_fault AS dropped,
  CAST(greatest(0, h.emitted - h.dropped_queue - h.dropped_limit - h.dropped_disk - h.dropped_crash - h.dropped_fault
    - greatest(0, coalesce(h.rejected, 0) - coalesce(s.rejected, 0)) - coalesce(s.rows, 0)) AS BIGINT) AS missing,
  h.retried, h.queue_length, h.overhead_ns / 1e9 AS overhead_s, s.batches, CAST(s.bytes AS BIGINT) AS bytes,
  to_time(h.time_ns) AS last_report, to_time(s.last_ns) AS last_stored
FROM said h FULL OUTER JOIN stored s ON s.producer = h.producer;
