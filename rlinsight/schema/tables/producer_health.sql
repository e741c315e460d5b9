-- What a producer says it emitted, sent and dropped (cumulative), from event rlinsight.producer.health.
CREATE TABLE producer_health (
  run_id VARCHAR, attempt INTEGER, producer VARCHAR, service_name VARCHAR, rank INTEGER, time_ns BIGINT, emitted BIGINT, sent BIGINT,
  dropped_queue BIGINT, dropped_limit BIGINT,
  dropped_disk BIGINT, dropped_crash BIGINT, dropped_fault BIGINT, rejected BIGINT, retried BIGINT, queue_length BIGINT, overhead_ns BIGINT,
  labels_dropped BIGINT, metrics_overflowing BIGINT
);
