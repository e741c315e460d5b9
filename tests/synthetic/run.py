"""What a synthetic run is, and the faults that can be planted in it."""

from __future__ import annotations

from dataclasses import dataclass

from rlinsight import names

SECOND = 1_000_000_000

# Seconds of each phase and the timeline bucket of its leaf work.
PHASES = (
    (names.DATA, "data", 0.05, "overhead"),
    (names.SAMPLE, "sample", 8.0, "productive"),
    (names.REWARD, "reward", 0.4, "productive"),
    (names.OLD_LOG_PROBS, "old_log_probs", 1.5, "productive"),
    (names.REF_LOG_PROBS, "ref_log_probs", 1.5, "productive"),
    (names.ADVANTAGES, "advantages", 0.02, "overhead"),
    (names.TRAIN, "train", 4.0, "productive"),
    (names.SYNC, "sync", 0.1, "overhead"),
    (names.RECORD, "record", 0.05, "overhead"),
)
WORKER_METHODS = {
    "sample": "generate",
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "train": "update",
}

# In step ``fault_step`` unless it says otherwise. Group and sample count from 0; replica 1 samples the odd ones.
FAULTS = {
    "stale_engine": "replica 1 took the step's weights, and samples the next step with those before all the same",
    "sync_failed": "the sync to replica 0 ends with an error",
    "wrong_checksum": "replica 0 serves other weights than were published",
    "missing_sync": "replica 1 gets no sync",
    "truncation": "every rollout hits the length cap and earns nothing",
    "gap": "nobody works for 10 s before the old log-probs",
    "straggler": "sample 1 of group 2 waits in the queue and ends when all others are long done",
    "missing_rank": "in the open step after the last, all ranks have begun their update but the last one",
    "hung": "the open step after the last goes on for ever, while its processes report that they live",
    "starved_engine": "replica 1 has nothing to do while the step samples",
    "zero_variance": "every rollout of every group fails",
    "reward_hack": "sample 0 of every group says the same, and earns the full reward for it",
    "garbled": "replica 1 emits bytes that are no text",
    "repetitive": "replica 0 repeats itself",
    "spike": "tokens 3 and 4 of sample 0 of group 0 become 20 times as likely in one update",
    "clipped_rollout": "every token of sample 1 of group 1 becomes 1.6 times as likely in one update, and is clipped",
    "mismatch": "the trainer's log-probs of sample 2 of group 1 are 0.5 off everywhere",
    "cache_mismatch": "those of all rollouts whose prompt came from the cache are 0.1 off",
    "always_off": "the trainer's log-probs are 0.2 off everywhere, in the whole run",
    "mixed_versions": "sample 3 of group 1 began under the weights before, and its first half is 0.5 off",
    "stale_rollouts": "samples 0 and 1 of group 3 are of weights four updates old",
    "entropy_collapse": "entropy vanishes in the last three tenths of every response",
    "rollout_error": "sample 1 of group 0 ends with an error of its environment",
    "request_error": "the first request of sample 1 of group 0 timed out, and was made again",
    "tool_error": "the tool call of the step times out",
    "dropped_group": "group 3 is dropped",
    "slow_after_sync": "replica 1 decodes at a quarter of its speed",
    "lost_content": "the texts and arrays of sample 0 of group 0 never arrive",
    "diverging": "from this step on every metric is 1 % off",
    "lagged": "the gradient norm follows the loss by two steps, in the whole run",
    "bad_resume": "from the first step of the attempt on the gradient norm is 20 times what it was",
    "eval_falls": "validation gets worse while the reward rises, in the whole run",
}


@dataclass(frozen=True)
class Run:
    """What to pretend. ``status`` None leaves the run open (no run end), in the middle of the step after its last."""

    run_id: str = "demo-20250101-120000-a1b2"
    name: str = "demo"
    project: str = "default"
    steps: int = 5
    groups: int = 4
    group_size: int = 4
    tokens: int = 12  # mean response length
    total_steps: int | None = None  # steps when unset
    attempt: int = 1
    first_step: int = 1
    resumed_from_step: int | None = None
    status: str | None = "finished"
    reason: str | None = None
    start_ns: int | None = None  # so that the run ends now, when unset
    texts: bool = True
    arrays: bool = True
    failed_rollouts: int = 0  # per step; their reward raised
    dropped: int = 0  # items the controller says it dropped
    seed: int = 0
    replicas: int = 1  # policy ranks, each with a rollout engine
    serving: bool = False  # engines report requests, samples, checksums; tools; validation every 2 steps
    ppo: bool = False  # critic, adaptive KL, rollout correction, and groups of equal rewards dropped
    faults: tuple[str, ...] = ()
    fault_step: int = 7

    def __post_init__(self) -> None:
        assert set(self.faults) <= set(FAULTS), self.faults

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1

    def has(self, fault: str, step: int) -> bool:
        """Whether ``fault`` shows in ``step``."""
        return fault in self.faults and step == self.fault_step

    def skill(self, step: int) -> float:
        """Probability that a rollout is right."""
        return 1 - 0.8 * 0.9**step
