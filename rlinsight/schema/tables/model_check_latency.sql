-- How fast an engine that `rlinsight check-model` tried answers so many callers, from event rlinsight.model_check.latency.
-- As a caller in the engine's process sees it; percentiles over requests, of inter_token over tokens.
CREATE TABLE model_check_latency (
  check_id VARCHAR, time_ns BIGINT, model VARCHAR, part VARCHAR, concurrency BIGINT, num_requests BIGINT,
  output_tokens BIGINT, tokens_per_s DOUBLE, ttft_p50_s DOUBLE, ttft_p90_s DOUBLE, ttft_p99_s DOUBLE, tpot_p50_s DOUBLE,
  tpot_p90_s DOUBLE, tpot_p99_s DOUBLE, inter_token_p50_s DOUBLE, inter_token_p90_s DOUBLE, inter_token_p99_s DOUBLE
);
