"""Every span, event, attribute and step-metric name rlinsight emits, with unit and meaning.

A ``Name`` is a plain ``str`` at run time; the registry behind it feeds the reference documentation and the tests.
``rl.*`` follows the draft RL conventions, ``gen_ai.*`` the GenAI semantic conventions, ``rlinsight.*`` is ours where no
standard exists. The ``gen_ai`` constants of the semconv package are marked deprecated there, so they are spelled here.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["resource", "span", "event", "attribute", "metric", "instrument"]
Agg = Literal["mean", "sum", "max", "min", "last", "std"]

REGISTRY: dict[str, Name] = {}
SCHEMA_URL = "https://rlinsight.dev/schemas/1"


class Name(str):
    """A registered telemetry name: ``kind``, ``unit`` (UCUM, "1" when dimensionless) and a one-line ``doc``."""

    kind: Kind
    unit: str
    doc: str
    agg: Agg | None

    def __new__(cls, value: str, kind: Kind, doc: str, unit: str = "", agg: Agg | None = None) -> Name:
        self = super().__new__(cls, value)
        self.kind, self.unit, self.doc, self.agg = kind, unit, doc, agg
        if value in REGISTRY:
            raise ValueError(f"telemetry name {value!r} is registered twice")
        REGISTRY[value] = self
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Other processes receive the plain string: their own registry has the name already."""
        return str, (str(self),)


def _resource(value: str, doc: str) -> Name:
    return Name(value, "resource", doc)


def _span(value: str, doc: str) -> Name:
    return Name(value, "span", doc)


def _event(value: str, doc: str) -> Name:
    return Name(value, "event", doc)


def _attr(value: str, doc: str, unit: str = "") -> Name:
    return Name(value, "attribute", doc, unit)


def _metric(value: str, agg: Agg, doc: str, unit: str = "1") -> Name:
    return Name(value, "metric", doc, unit, agg)


def _instrument(value: str, unit: str, doc: str) -> Name:
    return Name(value, "instrument", doc, unit)


# Resource: who emits -------------------------------------------------------------------------------------------------
SERVICE_NAME = _resource("service.name", "rlinsight.<role>: controller, policy, reference, reward, collector")
SERVICE_INSTANCE_ID = _resource("service.instance.id", "one per process start")
SYSTEM = _resource("rl.system", "the training system, rlinsight for this one")
RUN_ID = _resource("rl.run.id", "the run")
ATTEMPT = _resource("rl.run.attempt", "1 for the first start of a run, +1 per resume")
ALGORITHM = _resource("rl.algorithm", "algorithm preset, e.g. grpo")
MODEL = _resource("rl.model.name", "model source as configured")
WORKER_GROUP = _resource("rl.worker_group", "worker group the process belongs to")
RANK = _resource("rl.rank", "data-parallel rank inside the worker group")
WORLD_SIZE = _resource("rl.world_size", "size of the worker group")
HOST_NAME = _resource("host.name", "machine the process runs on")
PROCESS_ID = _resource("process.pid", "its process id there")

# Spans: the step and its phases (emitted by the controller) ----------------------------------------------------------
SETUP = _span("rl.setup", "everything before the first step: models, data, workers")
STEP = _span("rl.loop", "one step of the training loop; root of the step's trace")
DATA = _span("rl.data", "draw the step's prompts")
SAMPLE = _span("rl.sample", "sample a group of rollouts for each prompt")
REWARD = _span("rl.reward", "score every rollout")
OLD_LOG_PROBS = _span("rl.old_log_probs", "recompute the sampled tokens' log-probs under the policy before its update")
REF_LOG_PROBS = _span("rl.ref_log_probs", "log-probs under the frozen reference")
VALUES = _span("rl.values", "the critic's values of the sampled tokens before its update")
ADVANTAGES = _span("rl.advantages", "rewards to advantages")
TRAIN = _span("rl.train", "policy update: forward, backward, optimizer")
SYNC = _span("rl.sync", "publish the new weights to the rollout engine")
VALIDATE = _span("rl.validation", "sample and score the validation prompts; root of a trace of its own")
CHECKPOINT = _span("rl.checkpoint", "write a resumable checkpoint")
RECORD = _span("rl.record", "write the step's metrics to the trace")

# Spans: inside workers -----------------------------------------------------------------------------------------------
WORKER_CALL = _span("rl.worker.call", "one remote call as the worker saw it; a child of the controller's phase")
LOAD_MODEL = _span("rl.load_model", "read weights and tokenizer into a worker")
START_SERVER = _span("rl.start_server", "start a rollout engine's server and wait until it serves")
PREFILL = _span("rl.prefill", "rollout engine: prompt forward passes")
DECODE = _span("rl.decode", "rollout engine: token by token sampling")
EXACT_TEST = _span("rl.exact_test", "exact mode's self-test: does the engine agree with the trainer in every bit")
MICRO_BATCH = _span("rl.micro_batch", "forward and backward of one micro-batch")
OPTIMIZER = _span("rl.optimizer", "gradient clipping and the optimizer step")
WEIGHT_SYNC = _span("rl.weight_sync", "one engine receives one weight version")
HANDOVER = _span("rl.handover", "device memory changes hands between rollout engine and training")

# Spans: one trace per rollout, linked to the step that dispatched it -------------------------------------------------
ROLLOUT = _span("rl.rollout", "one sampled trajectory; root of the rollout's trace")
TURN = _span("chat", "one generate request of a rollout (GenAI span name: chat {model})")
ENGINE_REQUEST = _span("rl.engine.request", "one request as the rollout engine served it; a child of the turn's span")
VLLM_REQUEST = _span("llm_request", "the same from vLLM's own tracing")
TOOL = _span("execute_tool", "one tool call of a rollout (GenAI span name: execute_tool {tool})")

# Events (OTLP log records) -------------------------------------------------------------------------------------------
RUN_START = _event("rlinsight.run.start", "an attempt of a run begins: configuration, code version, host")
RUN_END = _event("rlinsight.run.end", "an attempt of a run ends: status, exit code, reason")
SPAN_START = _event("rlinsight.span.start", "a step-level span has begun, so a hang is visible before the span ends")
GROUP = _event("rlinsight.group", "a prompt was dispatched: its text, answer and group size")
GROUP_DROPPED = _event("rlinsight.group.dropped", "a group was sampled but is not learned from, and why")
TURN_CONTENT = _event("rlinsight.turn.content", "texts and per-token arrays of one turn, as the engine produced them")
REWARD_COMPONENT = _event("gen_ai.evaluation.result", "one reward component of one rollout")
ROLLOUT_SCORED = _event("rlinsight.rollout.scored", "the reward a rollout is learned from")
ROLLOUT_TRAINED = _event("rl.rollout.trained", "a turn was consumed by an update: advantage and per-token arrays")
STEP_METRIC = _event("rlinsight.step.metric", "one scalar of one step, with its reduction stated")
ENGINE_SAMPLE = _event("rlinsight.engine.sample", "what a rollout engine was doing at one moment")
EVAL = _event("rlinsight.eval", "one metric of one validation")
ALERT = _event("rlinsight.alert", "something looks wrong: which rule, and the query that shows it")
MODEL_CHECK = _event("rlinsight.model_check", "how training or one rollout engine took a model that was checked")
MODEL_CHECK_LATENCY = _event("rlinsight.model_check.latency", "how fast a checked engine answers so many callers")
SCRAPE_FAILED = _event("rlinsight.scrape.failed", "a metrics endpoint does not answer as it should, and why; on change")
SCRAPE_RECOVERED = _event("rlinsight.scrape.recovered", "a metrics endpoint answers again")
PRODUCER_HEALTH = _event("rlinsight.producer.health", "what a producer emitted, sent and dropped, cumulative")

# Attributes: identity ------------------------------------------------------------------------------------------------
STEP_INDEX = _attr("rl.step", "step of the run, from 1")
PHASE = _attr("rlinsight.phase", "phase of the step this span is; set on controller phases only")
BUCKET = _attr("rl.bucket", "productive, overhead, idle or wasted; on leaves only")
LANE = _attr("rlinsight.lane", "row of the timeline, e.g. controller, policy/0")
METHOD = _attr("rlinsight.worker.method", "worker method called")
GROUP_ID = _attr("rlinsight.group.id", "group: the rollouts of one prompt in one step")
ROLLOUT_ID = _attr("rlinsight.rollout.id", "rollout")
PROMPT_ID = _attr("rlinsight.prompt.id", "dataset item")
SAMPLE_INDEX = _attr("rlinsight.sample.index", "index of the rollout inside its group")
TURN_INDEX = _attr("rlinsight.turn.index", "turn of the rollout, from 0")
REQUEST_ID = _attr("rlinsight.request.id", "engine request")
DATA_SOURCE = _attr("rlinsight.data_source", "dataset or task the prompt came from")
SPLIT = _attr(
    "rlinsight.split",
    "what a rollout is for: train; eval, of a validation; baseline, whose reward others of its prompt are compared "
    "with; no update may learn from the last two. Absent is train",
)
ENV = _attr("rlinsight.env", "environment the rollout acted in")
ERROR_TYPE = _attr("error.type", "class of what went wrong; absent when nothing did")
POLICY_VERSION = _attr("rlinsight.policy_version", "optimizer steps applied to the weights in use")
POLICY_VERSION_MIN = _attr("rlinsight.policy_version.min", "oldest weights that sampled a token of the rollout")
POLICY_VERSION_MAX = _attr("rlinsight.policy_version.max", "newest weights that sampled a token of the rollout")
POLICY_VERSION_IN = _attr("rlinsight.policy_version.in", "policy_version when the step began")
POLICY_VERSION_OUT = _attr("rlinsight.policy_version.out", "policy_version when the step ended")

# Attributes: run -----------------------------------------------------------------------------------------------------
RUN_NAME = _attr("rlinsight.run.name", "name given in the config")
PROJECT = _attr("rlinsight.project", "project given in the config")
CONFIG = _attr("rlinsight.config", "resolved configuration as JSON")
CONFIG_HASH = _attr("rlinsight.config.hash", "sha256 of the resolved configuration")
CODE_VERSION = _attr("rlinsight.code_version", "package version and, in a checkout, the commit")
HOST = _attr("rlinsight.host", "hostname, cores, memory, platform, library versions as JSON")
RESUMED_FROM_STEP = _attr("rlinsight.resumed_from_step", "step of the checkpoint this attempt started from")
TOTAL_STEPS = _attr("rlinsight.total_steps", "steps the run is configured for")
STATUS = _attr("rlinsight.status", "run: finished, failed, interrupted; rollout: ok, error; score: ok, error, dropped")
EXIT_CODE = _attr("rlinsight.exit_code", "process exit code")
REASON = _attr("rlinsight.reason", "why, in one line")

# Attributes: sizes and settings --------------------------------------------------------------------------------------
BATCH_SIZE = _attr("rl.sample.batch_size", "rollouts in the step", "{rollout}")
NUM_PROMPTS = _attr("rlinsight.num_prompts", "prompts in the step", "{prompt}")
NUM_TOKENS = _attr("rlinsight.num_tokens", "tokens processed", "{token}")
GROUP_SIZE = _attr("rlinsight.group.size", "rollouts per prompt", "{rollout}")
SKIPPED = _attr("rlinsight.skipped", "why a phase did no work, e.g. provably equal to the update's own forward")
BYTES = _attr("rl.sync.bytes", "bytes moved to the engine; 0 when the weights are shared", "By")
REFRESHED_BYTES = _attr("rlinsight.sync.refreshed_bytes", "bytes of prepacked copies refreshed in place", "By")
PAUSE_MODE = _attr("rlinsight.sync.pause_mode", "what became of requests in flight: keep, abort or wait")
SYNC_IN_FLIGHT = _attr("rlinsight.sync.in_flight", "requests in flight when the sync began", "{request}")
SYNC_ABORTED = _attr("rlinsight.sync.aborted", "requests the sync aborted", "{request}")
CHECKSUM_TRAINED = _attr("rlinsight.sync.checksum.trained", "checksum of the weights that were published")
CHECKSUM_SERVED = _attr("rlinsight.sync.checksum.served", "checksum of the weights the engine serves after the sync")
HANDOVER_TO = _attr("rlinsight.handover.to", "who has the device's memory then: generating or training")
HANDOVER_BYTES = _attr("rlinsight.handover.bytes", "bytes freed, taken or moved for it; 0 where none must be", "By")
EXACT_LEVEL = _attr("rlinsight.exact.level", "level of exact mode that was tested: mkl or tile")
EXACT_MISMATCHED = _attr("rlinsight.exact.num_mismatched_tokens", "log-probs that differ in a bit", "{token}")
EXACT_GAP_MAX = _attr("rlinsight.exact.gap_max", "largest difference of a log-prob", "nat")
ENGINE = _attr("rlinsight.engine", "rollout engine, e.g. native")
REPLICA = _attr("rlinsight.replica", "engine replica, e.g. policy/0")
URL = _attr("url.full", "address scraped, without its query")
PATH = _attr("rlinsight.path", "file or directory written")

# Attributes: generation (GenAI conventions) --------------------------------------------------------------------------
OPERATION = _attr("gen_ai.operation.name", "chat")
REQUEST_MODEL = _attr("gen_ai.request.model", "model asked for")
TEMPERATURE = _attr("gen_ai.request.temperature", "sampling temperature")
TOP_P = _attr("gen_ai.request.top_p", "nucleus mass")
TOP_K = _attr("gen_ai.request.top_k", "top-k, absent when off")
MAX_TOKENS = _attr("gen_ai.request.max_tokens", "cap on new tokens", "{token}")
SEED = _attr("gen_ai.request.seed", "request seed")
FINISH_REASONS = _attr("gen_ai.response.finish_reasons", "list with one of stop, length, abort, error")
INPUT_TOKENS = _attr("gen_ai.usage.input_tokens", "prompt tokens", "{token}")
OUTPUT_TOKENS = _attr("gen_ai.usage.output_tokens", "sampled tokens", "{token}")
CACHED_TOKENS = _attr("gen_ai.usage.cache_read.input_tokens", "prompt tokens served from shared KV cache", "{token}")
CONVERSATION_ID = _attr("gen_ai.conversation.id", "rollout id, for GenAI tools")
TOOL_NAME = _attr("gen_ai.tool.name", "tool that was called")
TOOL_CALL_ID = _attr("gen_ai.tool.call.id", "the call's id in the conversation")

# Attributes: engine requests. Durations as the engine measured them: its clock is its own ----------------------------
QUEUE_S = _attr("gen_ai.latency.time_in_queue", "waiting to be scheduled", "s")
TTFT_S = _attr("gen_ai.latency.time_to_first_token", "arrival to first token", "s")
E2E_S = _attr("gen_ai.latency.e2e", "arrival to last token", "s")
PREFILL_S = _attr("gen_ai.latency.time_in_model_prefill", "prompt forward passes", "s")
DECODE_S = _attr("gen_ai.latency.time_in_model_decode", "first to last token", "s")
PREEMPTIONS = _attr("rlinsight.request.preemptions", "times the request lost its KV cache and began anew")
ABORTED = _attr("rlinsight.request.aborted", "whether it was stopped from outside")
CORRUPTED = _attr("rlinsight.request.corrupted", "whether its logits were not finite")

# Attributes: engine samples. Counters are cumulative since the engine's start ----------------------------------------
RUNNING = _attr("rlinsight.engine.running", "requests being decoded", "{request}")
WAITING_CAPACITY = _attr("rlinsight.engine.waiting.capacity", "requests waiting for room", "{request}")
WAITING_DEFERRED = _attr("rlinsight.engine.waiting.deferred", "requests waiting for anything else", "{request}")
KV_USAGE = _attr("rlinsight.engine.kv_usage", "share of KV cache blocks in use")
PREFIX_QUERIES = _attr("rlinsight.engine.prefix.queries", "prompt tokens looked up in the prefix cache", "{token}")
PREFIX_HITS = _attr("rlinsight.engine.prefix.hits", "prompt tokens found there", "{token}")
ENGINE_PROMPT_TOKENS = _attr("rlinsight.engine.prompt_tokens", "prompt tokens processed", "{token}")
ENGINE_OUTPUT_TOKENS = _attr("rlinsight.engine.generation_tokens", "tokens sampled", "{token}")
ENGINE_PREEMPTIONS = _attr("rlinsight.engine.preemptions", "requests preempted")
AWAKE = _attr("rlinsight.engine.awake", "whether the engine holds its weights and cache in device memory")

# Attributes: content. Arrays are bytes, little-endian; the element type is in the doc -------------------------------
PROMPT_TEXT = _attr("rlinsight.prompt.text", "prompt as text, after the chat template")
RESPONSE_TEXT = _attr("rlinsight.response.text", "response as text")
ANSWER = _attr("rlinsight.answer", "ground truth of the prompt as text")
PROMPT_TOKEN_IDS = _attr("rlinsight.tokens.prompt_ids", "int32 bytes [P]")
TOKEN_IDS = _attr("rlinsight.tokens.ids", "int32 bytes [T], sampled tokens of the turn")
TOKEN_PIECES = _attr(
    "rlinsight.tokens.pieces", "string array [T], text of each sampled token; only when texts are captured in full"
)
ROLLOUT_LOG_PROBS = _attr("rlinsight.tokens.rollout_log_probs", "float32 bytes [T], reported by the engine")
POLICY_VERSIONS = _attr(
    "rlinsight.tokens.policy_versions", "int32 bytes [T], weights that sampled each token; absent when all are the same"
)
LOSS_MASK = _attr("rlinsight.tokens.loss_mask", "uint8 bytes [T], 1 where the token entered the loss")
OLD_LOG_PROBS_ARRAY = _attr("rlinsight.tokens.old_log_probs", "float32 bytes [T], the PPO anchor")
LOG_PROBS_ARRAY = _attr("rlinsight.tokens.log_probs", "float32 bytes [T], in the last update pass of the step")
REF_LOG_PROBS_ARRAY = _attr("rlinsight.tokens.ref_log_probs", "float32 bytes [T], frozen reference")
ENTROPY_ARRAY = _attr("rlinsight.tokens.entropy", "float32 bytes [T], entropy of the full distribution", "nat")
ADVANTAGES_ARRAY = _attr("rlinsight.tokens.advantages", "float32 bytes [T]")
WEIGHTS_ARRAY = _attr(
    "rlinsight.tokens.weights", "float32 bytes [T], importance weights; 0 where rejected, absent without correction"
)
VALUES_ARRAY = _attr("rlinsight.tokens.values", "float32 bytes [T], the critic's, before its update")
RETURNS_ARRAY = _attr("rlinsight.tokens.returns", "float32 bytes [T], what the critic learns")
CLIPPED_ARRAY = _attr(
    "rlinsight.tokens.clipped", "uint8 bytes [T], 1 where a bound of the loss changed the token's part"
)

# Attributes: rewards (GenAI evaluation conventions) ------------------------------------------------------------------
COMPONENT = _attr("gen_ai.evaluation.name", "reward component")
COMPONENT_VALUE = _attr("gen_ai.evaluation.score.value", "value before its weight")
COMPONENT_LABEL = _attr("gen_ai.evaluation.score.label", "verifier's label, e.g. correct")
COMPONENT_EXPLANATION = _attr("gen_ai.evaluation.explanation", "what the verifier saw, in one line")
COMPONENT_WEIGHT = _attr("rlinsight.reward.weight", "weight of the component in the reward")
COMPONENT_LATENCY = _attr("rlinsight.reward.latency", "time the component took", "s")
REWARD_VALUE = _attr("rl.reward.score", "reward of the rollout: weighted sum of its components")
ADVANTAGE = _attr("rlinsight.advantage", "advantage of the rollout (scalar algorithms)")

# Attributes: span starts and step metrics ----------------------------------------------------------------------------
START_NAME = _attr("rlinsight.span.name", "name of the span that began")
START_NS = _attr("rlinsight.span.start_ns", "its start, unix nanoseconds", "ns")
START_PARENT = _attr("rlinsight.span.parent_id", "span id of its parent, hex; absent for a root")
METRIC_NAME = _attr("rlinsight.metric.name", "step metric")
METRIC_VALUE = _attr("rlinsight.metric.value", "its value; absent when undefined")
METRIC_AGG = _attr("rlinsight.metric.agg", "how it was reduced: mean, sum, max, min, last, std")
METRIC_UNIT = _attr("rlinsight.metric.unit", "UCUM unit")
METRIC_WEIGHT = _attr("rlinsight.metric.weight", "what the reduction counted: token, rollout, group, step")

# Attributes: validation and alerts -----------------------------------------------------------------------------------
EVAL_DATASET = _attr("rlinsight.eval.dataset", "what was validated on")
EVAL_METRIC = _attr("rlinsight.eval.metric", "e.g. mean@1, pass@8, loss")
EVAL_VALUE = _attr("rlinsight.eval.value", "its value")
EVAL_STD_ERROR = _attr("rlinsight.eval.std_error", "standard error of the value, over prompts; absent for one prompt")
EVAL_SAMPLES = _attr("rlinsight.eval.num_samples", "rollouts behind it", "{rollout}")
ALERT_RULE = _attr("rlinsight.alert.rule", "rule that fired")
ALERT_SEVERITY = _attr("rlinsight.alert.severity", "info, warning or critical")
ALERT_MESSAGE = _attr("rlinsight.alert.message", "what was seen, in one line")
ALERT_EVIDENCE = _attr("rlinsight.alert.evidence_sql", "the query that shows it")

# Attributes: checks of a model ---------------------------------------------------------------------------------------
CHECK_ID = _attr("rlinsight.check.id", "one call of rlinsight check-model")
CHECK_PART = _attr("rlinsight.check.part", "what took the model: training, or a rollout engine")
CHECK_STATUS = _attr("rlinsight.check.status", "ok, mismatch, refused, failed or not installed")
CHECK_ARCHITECTURE = _attr("rlinsight.check.architecture", "class of the model in transformers")
CHECK_PARAMETERS = _attr("rlinsight.check.num_parameters", "its weights")
CHECK_DTYPE = _attr("rlinsight.check.dtype", "precision it computed in")
CHECK_LOAD_S = _attr(
    "rlinsight.check.load", "training: time to read the weights; an engine: to start over them and take them", "s"
)
CHECK_PROMPTS = _attr("rlinsight.check.num_prompts", "prompts answered", "{prompt}")
CHECK_TOKENS = _attr("rlinsight.check.num_tokens", "tokens whose log-probs were compared", "{token}")
CHECK_PARITY = _attr("rlinsight.check.parity", "share of prompts whose greedy tokens are all those of transformers")
CHECK_DIVERGENT_PROMPT = _attr(
    "rlinsight.check.divergence.prompt", "prompt whose first other token rounding explains least, from 0"
)
CHECK_DIVERGENT_POSITION = _attr("rlinsight.check.divergence.position", "that token's place in the response, from 0")
CHECK_EXPECTED_PIECE = _attr("rlinsight.check.divergence.expected_piece", "what transformers wrote there, as text")
CHECK_FOUND_PIECE = _attr("rlinsight.check.divergence.found_piece", "what the engine wrote there, as text")
CHECK_EXPECTED_LOG_PROB = _attr(
    "rlinsight.check.divergence.expected_log_prob", "log-prob of transformers' token, under transformers", "nat"
)
CHECK_FOUND_LOG_PROB = _attr(
    "rlinsight.check.divergence.found_log_prob", "log-prob of the engine's token, under the engine", "nat"
)
CHECK_LEAD = _attr(
    "rlinsight.check.divergence.expected_lead",
    "by how much transformers preferred its token to the second likeliest; near 0, rounding decides",
    "nat",
)
CHECK_MAX_GAP = _attr(
    "rlinsight.check.max_log_prob_gap",
    "largest |log-prob difference|; training: from transformers, an engine: from training; infinite: one is not finite",
    "nat",
)
CHECK_MEAN_GAP = _attr("rlinsight.check.mean_log_prob_gap", "its mean over the tokens", "nat")
CHECK_TOKENS_PER_S = _attr("rlinsight.check.tokens_per_s", "tokens sampled a second", "{token}/s")
CHECK_CONCURRENCY = _attr("rlinsight.check.concurrency", "callers, each with one request at a time")
CHECK_REQUESTS = _attr("rlinsight.check.num_requests", "requests answered", "{request}")
CHECK_LATENCY = {
    f"{what}_p{p}_s": _attr(f"rlinsight.check.{what}.p{p}", f"percentile {p} of {doc}", "s")
    for what, doc in (
        ("ttft", "the time from a request to its first token"),
        ("tpot", "a request's mean time for each further token"),
        ("inter_token", "the time between two tokens of a request"),
    )
    for p in (50, 90, 99)
}

# Attributes: producer health -----------------------------------------------------------------------------------------
PRODUCER = _attr("rlinsight.producer", "producer id: one per process start")
EMITTED = _attr("rlinsight.producer.emitted", "items handed to the exporter")
SENT = _attr("rlinsight.producer.sent", "items acknowledged by the collector")
DROPPED_QUEUE = _attr("rlinsight.producer.dropped_queue", "items dropped because the queue was full")
DROPPED_LIMIT = _attr(
    "rlinsight.producer.dropped_limit", "items dropped because the spool reached its byte cap, or too big for a request"
)
DROPPED_DISK = _attr("rlinsight.producer.dropped_disk", "items dropped because the spool could not be written")
DROPPED_CRASH = _attr("rlinsight.producer.dropped_crash", "items lost unsynced when the producer was killed")
DROPPED_FAULT = _attr("rlinsight.producer.dropped_fault", "items that could not be built")
REJECTED = _attr("rlinsight.producer.rejected", "items the collector refused; whole batches stay in a dead-letter file")
RETRIED = _attr("rlinsight.producer.retried", "batches sent more than once")
QUEUE_LENGTH = _attr("rlinsight.producer.queue_length", "batches waiting in the spool")
LABELS_DROPPED = _attr("rlinsight.producer.labels_dropped", "attributes of measurements left out: ids are no labels")
METRICS_OVERFLOWING = _attr("rlinsight.producer.metrics_overflowing", "metrics with more attribute sets than allowed")
OVERHEAD_NS = _attr("rlinsight.producer.overhead_ns", "time spent inside emit calls", "ns")

# Step metrics --------------------------------------------------------------------------------------------------------
M_REWARD_MEAN = _metric("reward/mean", "mean", "reward over the step's rollouts")
M_REWARD_STD = _metric("reward/std", "std", "spread of the reward over the step's rollouts")
M_REWARD_MAX = _metric("reward/max", "max", "best reward")
M_REWARD_MIN = _metric("reward/min", "min", "worst reward")
M_ZERO_VARIANCE = _metric(
    "reward/zero_variance_groups", "mean", "share of groups whose rewards are all equal: no signal"
)
M_ADVANTAGE_ABS = _metric("advantage/abs_mean", "mean", "mean absolute advantage over loss tokens")
M_LENGTH_MEAN = _metric("response_length/mean", "mean", "sampled tokens per rollout", "{token}")
M_LENGTH_MAX = _metric("response_length/max", "max", "longest response", "{token}")
M_TRUNCATED = _metric("response_length/truncated", "mean", "share of rollouts cut off at max_new_tokens")
M_PROMPT_LENGTH = _metric("prompt_length/mean", "mean", "prompt tokens per rollout", "{token}")
M_ENTROPY = _metric("policy/entropy", "mean", "entropy per response token", "nat")
M_ROLLOUT_KL = _metric(
    "policy/rollout_kl",
    "mean",
    "k3 of rollout_log_probs against the trainer's, float64: old_log_probs, or with correction.mode bypass log_probs "
    "where the weights are those that sampled",
    "nat",
)
M_ROLLOUT_ABS = _metric(
    "policy/rollout_log_prob_gap", "mean", "mean |difference| of the log-probs of rollout_kl", "nat"
)
M_ROLLOUT_MAX = _metric(
    "policy/rollout_log_prob_gap_max", "max", "max |difference| of the log-probs of rollout_kl", "nat"
)
M_MISMATCHED = _metric("policy/num_mismatched_tokens", "sum", "tokens whose two log-probs differ in any bit", "{token}")
M_POLICY_KL = _metric("policy/policy_kl", "mean", "k3 of old_log_probs against log_probs", "nat")
M_REF_KL = _metric("policy/ref_kl", "mean", "k3 of log_probs against ref_log_probs", "nat")
M_CLIP_FRACTION = _metric("policy/clip_fraction", "mean", "share of loss tokens that a bound of the loss changed")
M_RATIO_MAX = _metric(
    "policy/ratio_max", "max", "largest exp(log_probs - old_log_probs), of a token; of a rollout with gspo and gmpo"
)
M_LOSS = _metric("loss/total", "mean", "the loss that was minimised")
M_POLICY_LOSS = _metric("loss/policy", "mean", "policy term")
M_KL_LOSS = _metric("loss/kl", "mean", "KL term before its coefficient")
M_ENTROPY_LOSS = _metric("loss/entropy", "mean", "entropy as the loss weighs tokens, before its coefficient")
M_KL_COEF = _metric("kl/coef", "last", "weight of the KL to the reference; an adaptive controller moves it")
M_KL_REWARD = _metric("kl/reward", "mean", "KL taken off the reward, per rollout, before its weight", "nat")
M_GROUPS_DROPPED = _metric("sampling/groups_dropped", "sum", "groups that were sampled and not learned from")
M_FAILED_ROLLOUTS = _metric("sampling/failed_rollouts", "sum", "rollouts whose request failed for good")
M_SAMPLING_ROUNDS = _metric("sampling/rounds", "sum", "times the step sampled to get enough groups")
M_CORRECTION = {
    name: _metric(f"correction/{name}", "mean", doc, unit)
    for name, doc, unit in (
        ("k1", "KL of the engine's policy from the trainer's per token, from one sample each", "nat"),
        ("k3", "the same, never negative", "nat"),
        ("chi2_token", "mean squared ratio of trainer to engine minus 1, by token", "1"),
        ("chi2_sequence", "the same by rollout", "1"),
        ("effective_sample_size", "share of the tokens that their ratios leave as independent samples", "1"),
        ("perplexity_ratio", "trainer's perplexity over the engine's, by rollout", "1"),
        ("weight_mean", "importance weight per token, before it is normalised", "1"),
        ("weight_bounded_fraction", "share of tokens whose weight a bound changed", "1"),
        ("weight_effective_sample_size", "share of the tokens that their weights leave as independent samples", "1"),
        ("rejected_token_fraction", "share of tokens left out of the loss", "1"),
        ("rejected_rollout_fraction", "share of rollouts that lost a token", "1"),
    )
}
M_GRAD_NORM = _metric("optim/grad_norm", "mean", "gradient norm before clipping, over the step's updates")
M_GRAD_NORM_MAX = _metric("optim/grad_norm_max", "max", "largest gradient norm of the step's updates, before clipping")
M_GRAD_NORM_GROUPS = {
    group: _metric(f"optim/grad_norm/{group}", "mean", f"gradient norm of {what}, over the step's updates")
    for group, what in {
        "embeddings": "the embeddings, with the output layer where the two are tied",
        "attention": "the attention projections",
        "mlp": "the feed-forward layers",
        "norms": "the normalisation layers",
        "head": "the output layer",
        "value_head": "the value head",
        "lora": "the adapters",
        "other": "parameters of no other group",
    }.items()
}
M_LR = _metric("optim/learning_rate", "last", "learning rate of the update")
M_WEIGHTS_CHANGED = _metric(
    "optim/weights_changed",
    "mean",
    "share of the trained weights an update changed, over the step's updates; near 0: updates are rounded away",
)
M_VALUE_LOSS = _metric("critic/value_loss", "mean", "value term before its coefficient")
M_EXPLAINED_VARIANCE = _metric(
    "critic/explained_variance",
    "mean",
    "1 - Var(return - value) / Var(return) over loss tokens, values before the update",
)
M_VALUE_CLIP_FRACTION = _metric(
    "critic/clip_fraction", "mean", "share of loss tokens whose value gradient the clip cut"
)
M_VALUE_MEAN = _metric("critic/value_mean", "mean", "value per loss token before the update")
M_RETURN_MEAN = _metric("critic/return_mean", "mean", "return per loss token")
M_CRITIC_GRAD_NORM = _metric(
    "critic/grad_norm", "mean", "gradient norm of a critic of its own before clipping, over the step's updates"
)
M_CRITIC_GRAD_NORM_GROUPS = {
    group: _metric(f"critic/grad_norm/{group}", "mean", f"of a critic of its own, the gradient norm of {what}")
    for group, what in {
        "embeddings": "the embeddings",
        "attention": "the attention projections",
        "mlp": "the feed-forward layers",
        "norms": "the normalisation layers",
        "value_head": "the value head",
        "other": "parameters of no other group",
    }.items()
}
M_CRITIC_LR = _metric("critic/learning_rate", "last", "learning rate of a critic of its own")
M_STALENESS = _metric(
    "policy/staleness", "mean", "trainer's policy_version minus the rollout's, when consumed", "{update}"
)
M_TOKENS_PER_S = _metric(
    "perf/tokens_per_s", "last", "prompt and response tokens over the step's wall time", "{token}/s"
)
M_SAMPLES_PER_S = _metric("perf/samples_per_s", "last", "rollouts over the step's wall time", "{rollout}/s")
M_GEN_TOKENS_PER_S = _metric("perf/generation_tokens_per_s", "last", "sampled tokens over generation time", "{token}/s")

# Instruments: what a clock samples (OpenTelemetry semantic conventions) ----------------------------------------------
PROCESS_CPU = _instrument("process.cpu.utilization", "1", "CPU time over wall time, of the cores the process may use")
PROCESS_MEMORY = _instrument("process.memory.usage", "By", "resident memory of the process")
PROCESS_THREADS = _instrument("process.thread.count", "{thread}", "threads of the process")
PROCESS_FILES = _instrument("process.unix.file_descriptor.count", "{file_descriptor}", "open files of the process")
SYSTEM_CPU = _instrument("system.cpu.utilization", "1", "share of the machine's CPU time by cpu.mode")
SYSTEM_MEMORY = _instrument("system.memory.usage", "By", "memory of the machine by system.memory.state")
SYSTEM_MEMORY_LIMIT = _instrument("system.memory.limit", "By", "memory the machine has")
SYSTEM_DISK = _instrument("system.disk.io", "By", "bytes its disks read and wrote, by disk.io.direction")
SYSTEM_NETWORK = _instrument(
    "system.network.io", "By", "bytes its network moved, loopback aside, by network.io.direction"
)
GPU_UTILIZATION = _instrument("hw.gpu.utilization", "1", "share of time a kernel ran on the GPU named by hw.id")
GPU_MEMORY = _instrument("hw.gpu.memory.usage", "By", "memory of the GPU in use")
GPU_MEMORY_LIMIT = _instrument("hw.gpu.memory.limit", "By", "memory the GPU has")
GPU_TEMPERATURE = _instrument("hw.temperature", "Cel", "temperature of the GPU")
GPU_POWER = _instrument("hw.power", "W", "power the GPU draws")

# Instruments: about scraping (names as Prometheus has them) ----------------------------------------------------------
UP = _instrument("up", "1", "1 if the scrape of the target brought metrics, 0 if not")
SCRAPE_DURATION = _instrument("scrape_duration_seconds", "s", "time the scrape took")
SCRAPE_SAMPLES = _instrument("scrape_samples_scraped", "{sample}", "samples the target exposed")

METRICS: dict[str, Name] = {name: value for name, value in REGISTRY.items() if value.kind == "metric"}
