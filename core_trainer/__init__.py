"""The trainer: controller loop, workers, algorithms, rollout engines. Emits through rlinsight.telemetry only."""
