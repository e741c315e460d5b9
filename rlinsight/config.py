"""The YAML of a run as a frozen, closed pydantic tree.

Owns: every option, its default, its meaning (the field descriptions feed ``rlinsight config schema`` and the docs) and
every combination that is refused. Loads no torch. A class elsewhere receives its own section, never the whole tree.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from rlinsight import DEFAULT_STORE
from rlinsight.errors import ConfigError


class Section(BaseModel):
    """A closed, immutable part of the config."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)


class RunSection(Section):
    """What the run is called and where its files go."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9._-]+$", description="run name; part of the run id and its folder"
    )
    project: str = Field(default="default", description="groups runs in the dashboard")
    dir: Path = Field(
        default=Path("runs"), description="folder of runs: <dir>/<run id>/ holds checkpoints, config and spool"
    )
    seed: int = Field(default=1, ge=0, lt=2**31, description="seeds data order and sampling")


class ModelSection(Section):
    """The policy to train."""

    source: str = Field(
        description="safetensors directory, Hugging Face id, .gguf file, or package:<name> of a package that ships one"
    )
    revision: str | None = Field(default=None, description="hub revision; hub ids only")
    master_dtype: Literal["float32", "compute"] = Field(
        default="float32",
        description="precision the optimizer updates; with 'compute' in bfloat16, small updates round to nothing",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="precision of forward and backward; auto picks bfloat16 where the processor has it"
    )


class DataSection(Section):
    """Where prompts come from."""

    train: str = Field(description="path to .jsonl or .parquet, or reasoning_gym:<task>")
    task_args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the reasoning_gym task, e.g. max_digits: 1"
    )
    size: int | None = Field(
        default=None, ge=1, description="prompts to generate (reasoning_gym) or to keep (files); all when unset"
    )
    prompt_column: str = Field(default="prompt", description="column with text, or a list of {role, content} messages")
    answer_column: str = Field(default="answer", description="column with the ground truth passed to the reward")
    system_prompt: str | None = Field(
        default=None, description="system message of prompts that have none; the chat template's own when unset"
    )
    prompt_suffix: str = Field(default="", description="text added to the end of the last user message")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="longest prompt after the chat template")
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="what a prompt over max_prompt_tokens does"
    )
    shuffle: bool = Field(default=True, description="new order each epoch, from the run's seed")

    @model_validator(mode="after")
    def _no_idle_options(self) -> DataSection:
        if self.task_args and not self.train.startswith("reasoning_gym:"):
            raise ValueError(
                f"task_args only apply to reasoning_gym:<task>, and train is {self.train!r}; remove task_args"
            )
        # Defaults are let through, so that a resolved config can be loaded again.
        fields = type(self).model_fields
        named = [key for key in ("prompt_column", "answer_column") if getattr(self, key) != fields[key].default]
        if named and self.train.startswith("reasoning_gym:"):
            raise ValueError(f"{named[0]} has no effect with {self.train}: items are generated; remove it")
        return self


class _RewardFunction(Section):
    name: str | None = Field(
        default=None, description="component name in the trace; the type (or function name) when unset"
    )
    weight: float = Field(default=1.0, description="weight in the rollout's reward")


class _TimedReward(_RewardFunction):
    timeout_s: float = Field(default=10.0, gt=0, description="longest time one call may take; then it is killed")


class NumericReward(_RewardFunction):
    """1 when the last number in the response equals the answer, else 0."""

    type: Literal["numeric"]
    tolerance: float = Field(default=1e-6, ge=0, description="largest relative difference that still counts as equal")


class MathVerifyReward(_TimedReward):
    """1 when math-verify finds the response's final expression equivalent to the answer, else 0."""

    type: Literal["math_verify"]


class RegexReward(_TimedReward):
    """1 when the pattern is found in the response (format checks), else 0."""

    type: Literal["regex"]
    pattern: str = Field(description="Python regular expression, searched with DOTALL")
    full_match: bool = Field(default=False, description="the whole response must match")

    @model_validator(mode="after")
    def _pattern_compiles(self) -> RegexReward:
        import re

        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from None
        return self


class TaskReward(_TimedReward):
    """The reasoning_gym task's own score of the response, in [0, 1]."""

    type: Literal["reasoning_gym"]


class FunctionReward(_TimedReward):
    """A function of yours: ``def score(prompt, response, answer, **columns) -> float``, plain or async.

    It returns a number, or a mapping of component name to number; the components then stand in the trace by name.
    """

    type: Literal["function"]
    function: str = Field(
        pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$", description="module:function, or path/to/file.py:function"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="extra keyword arguments of every call")


RewardFunction = Annotated[
    NumericReward | MathVerifyReward | RegexReward | TaskReward | FunctionReward, Field(discriminator="type")
]


class RewardSection(Section):
    """How a response is scored."""

    functions: list[RewardFunction] = Field(min_length=1, description="components; the reward is their weighted sum")
    on_error: Literal["fail", "zero"] = Field(
        default="fail",
        description="a component that raises, times out or returns NaN stops the run, or counts as 0 and is recorded",
    )
    concurrency: int = Field(
        default=4, ge=1, description="calls in flight at once; a process each, async functions share one"
    )

    @model_validator(mode="after")
    def _component_names_differ(self) -> RewardSection:
        names = [component_name(function) for function in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward functions are called {name!r}; give each its own name:")
        return self


def component_name(function: RewardFunction) -> str:
    """Name of a reward component in the trace."""
    if function.name:
        return function.name
    return function.function.rsplit(":", 1)[1] if isinstance(function, FunctionReward) else function.type


class VllmSection(Section):
    """vLLM in the policy worker's process."""

    kv_cache_gib: float = Field(default=1.0, gt=0, description="memory of vLLM's KV cache, in GiB per worker")


class RolloutSection(Section):
    """How rollouts are sampled."""

    engine: Literal["native", "vllm"] = Field(
        default="native", description="rollout engine; native shares the policy's own weights, vllm holds a copy"
    )
    vllm: VllmSection = Field(default_factory=VllmSection, description="options of the vllm engine")
    group_size: int = Field(default=8, ge=1, description="rollouts per prompt")
    max_new_tokens: int = Field(default=256, ge=1, description="cap on sampled tokens of a rollout")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature; the same in training")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass")
    top_k: int | None = Field(default=None, ge=1, description="keep the k likeliest tokens; off when unset")
    stop: list[str] = Field(
        default_factory=list, description="strings that end a response, besides the end-of-turn token"
    )
    max_batch_size: int = Field(default=256, ge=1, description="rollouts decoded at once per worker")

    @model_validator(mode="after")
    def _engine_options(self) -> RolloutSection:
        # Defaults are let through, so that a resolved config can be loaded again.
        if self.engine != "vllm" and self.vllm != VllmSection():
            raise ValueError(f"vllm has no effect with engine {self.engine}; set engine: vllm or remove vllm")
        if self.engine == "vllm" and self.temperature < 0.01:
            raise ValueError(
                f"vLLM samples temperature={self.temperature:g} at 0.01; raise temperature or set engine: native"
            )
        return self


class AlgorithmSection(Section):
    """GRPO: group-normalised advantages, PPO clip (DeepSeekMath, arXiv 2402.03300)."""

    name: Literal["grpo"] = Field(default="grpo", description="algorithm")
    normalize_by_std: bool = Field(
        default=True, description="divide advantages by the group's std; false is Dr.GRPO (arXiv 2503.20783)"
    )
    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="ratio may fall to 1 - clip_low before its gradient is cut"
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="ratio may rise to 1 + clip_high before its gradient is cut"
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="bound on the loss of negative advantages (arXiv 1912.09729)"
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = Field(
        default="token-mean",
        description="how per-token losses become one number; over the whole step, whatever the micro-batches",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL loss to the frozen reference; 0 loads no reference"
    )
    kl_estimator: Literal["k2", "k3"] = Field(
        default="k3", description="KL estimator of the loss (joschu.net/blog/kl-approx)"
    )
    num_epochs: int = Field(default=1, ge=1, description="passes over the step's rollouts")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")

    @model_validator(mode="after")
    def _no_idle_options(self) -> AlgorithmSection:
        # The default is let through, so that a resolved config can be loaded again.
        if self.kl_coef == 0 and self.kl_estimator != type(self).model_fields["kl_estimator"].default:
            raise ValueError("kl_estimator has no effect while kl_coef is 0; set kl_coef > 0 or remove kl_estimator")
        if self.num_epochs == self.num_mini_batches == 1:
            for option in ("clip_low", "clip_high", "dual_clip"):
                if getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(
                        f"{option} has no effect with one update per step, where the ratio is always 1; raise "
                        f"num_epochs or num_mini_batches, or remove {option}"
                    )
        return self


class TrainerSection(Section):
    """The loop, the optimizer and where they run."""

    total_steps: int = Field(default=100, ge=1, description="optimizer iterations of the loop")
    prompts_per_step: int = Field(default=8, ge=1, description="prompts (groups) per step")
    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate of AdamW")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up; constant after")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW betas")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient norm is clipped to this")
    micro_batch_tokens: int = Field(
        default=4096, ge=1, description="tokens per forward and backward; memory, not results, depends on it"
    )
    num_workers: int = Field(default=1, ge=1, description="data-parallel policy workers")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 keeps only the last one")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")


class ScrapeTarget(Section):
    """An endpoint in Prometheus' or OpenMetrics' text format, e.g. of a rollout engine's server."""

    url: str = Field(description="http or https address, e.g. http://127.0.0.1:8000/metrics")
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=100, description="service.name of its metrics")
    interval_s: float = Field(default=5.0, ge=0.1, le=3600, description="time between two scrapes")
    labels: dict[str, str] = Field(default_factory=dict, description="resource attributes of its metrics")

    @model_validator(mode="after")
    def _url_is_usable(self) -> ScrapeTarget:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(
                f"url={self.url!r} is no http or https address; write one like http://127.0.0.1:8000/metrics"
            )
        if "@" in urlsplit(self.url).netloc:
            raise ValueError("url holds credentials, which would be stored; scrape an address that needs none")
        return self


class TelemetrySection(Section):
    """What is recorded and where it is stored."""

    enabled: bool = Field(default=True, description="false trains without a record: no collector, nothing stored")
    store: Path = Field(default=DEFAULT_STORE, description="DuckDB file of all runs")
    text: Literal["full", "redacted", "off"] = Field(
        default="full", description="capture of prompts and responses; redacted keeps lengths and hashes only"
    )
    token_arrays: bool = Field(
        default=True, description="record token ids, log-probs, entropy and masks of every token"
    )
    token_decimals: int | None = Field(
        default=5,
        ge=1,
        le=7,
        description="decimals kept of log-probs, entropy and advantages of tokens, which take a fourth more on disk "
        "without rounding; null keeps every bit",
    )
    spool_bytes: int = Field(
        default=2 * 1024**3, ge=1024**2, description="cap on undelivered telemetry on disk, per process"
    )
    metrics_interval_s: float = Field(
        default=5.0, ge=0.1, le=3600, description="time between two collections of metrics, in every process"
    )
    system_metrics: bool = Field(
        default=True, description="CPU, memory, disk, network and GPUs of every process and machine"
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="the collector this run starts removes runs not heard of for so many days; null keeps them all",
    )
    keep_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="the collector this run starts removes the oldest runs while the store uses more, e.g. 200GB",
    )
    scrape: list[ScrapeTarget] = Field(
        default_factory=list, description="metrics endpoints the collector scrapes while the run lasts"
    )

    @field_validator("text", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads an unquoted off

    @model_validator(mode="after")
    def _no_idle_options(self) -> TelemetrySection:
        fields = type(self).model_fields.items()
        changed = [
            name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        idle = sorted(set(changed) - {"enabled", "store"})
        if idle and not self.enabled:
            raise ValueError(f"enabled=false records nothing; remove {', '.join(idle)}, or enable it")
        return self

    @model_validator(mode="after")
    def _target_names_differ(self) -> TelemetrySection:
        names = [target.name for target in self.scrape]
        if len(set(names)) < len(names):
            raise ValueError(f"scrape names {', '.join(names)} repeat; give each target a name of its own")
        return self


class Config(Section):
    """The whole run."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} with {self.algorithm.name} gives zero advantages; "
                "set rollout.group_size >= 2"
            )
        groups, workers = self.trainer.prompts_per_step, self.trainer.num_workers
        if groups % workers:
            raise ValueError(
                f"trainer.prompts_per_step={groups} does not divide by trainer.num_workers={workers}; "
                f"set prompts_per_step to a multiple of {workers}"
            )
        if groups // workers < self.algorithm.num_mini_batches:
            raise ValueError(
                f"algorithm.num_mini_batches={self.algorithm.num_mini_batches} with {groups // workers} prompts "
                "per worker leaves a mini-batch empty; lower num_mini_batches or raise trainer.prompts_per_step"
            )
        uses_task = any(isinstance(function, TaskReward) for function in self.reward.functions)
        if uses_task and not self.data.train.startswith("reasoning_gym:"):
            raise ValueError(
                f"reward type reasoning_gym needs data.train: reasoning_gym:<task>, not {self.data.train!r}"
            )
        return self

    def hash(self) -> str:
        """sha256 over the resolved values, so equal settings give equal hashes."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply dotted overrides such as ``trainer.total_steps=3``.

    Raises ConfigError naming the key's path, the value and the fix.
    """
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; see configs/quickstart.yaml for one to start from")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}, not a mapping of sections; start it with 'model:'")
    for override in overrides or []:
        _apply_override(tree, override)
    return parse(tree, str(path))


def parse(tree: dict[str, Any], origin: str = "config") -> Config:
    """Validate a mapping. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: " + "; ".join(dict.fromkeys(lines))) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. trainer.total_steps=3")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from None
    node: Any = tree
    *parents, leaf = key.split(".")
    for i, part in enumerate(parents):
        if isinstance(node, list):
            node = _list_item(node, part, override)
            continue
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict | list):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[: i + 1])} is a value, not a section")
        node = child
    if isinstance(node, list):
        _list_item(node, leaf, override)
        node[int(leaf)] = value
    else:
        node[leaf] = value


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"override {override!r}: {index!r} is not an index below {len(items)}")
    return items[int(index)]


def _explain(problem: Any) -> str:
    """One pydantic error as 'path: what is wrong with which value; what fixes it'."""
    location = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    # A discriminated union inserts its tag after the list index; the YAML has no such level.
    if len(location) >= 4 and location[:2] == ["reward", "functions"]:
        location = location[:3] + location[4:]
    path = ".".join(str(part) for part in location)
    kind, value = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(location[:-1], problem)
        close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if kind == "missing":
        return f"{path}: missing; add it"
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}={value!r}: {message[0].lower()}{message[1:]}"


def _keys_at(location: list[Any], problem: Any) -> list[str]:
    """Field names of the section at ``location``."""
    model: type[BaseModel] = Config
    for part in location:
        if isinstance(part, int) or part not in model.model_fields:
            continue
        annotation = model.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
        else:  # the list of reward functions: take the variant named by the tag
            tag = next((p for p in problem["loc"][3:4] if isinstance(p, str)), "")
            for variant in get_args(get_args(RewardFunction)[0]):
                if tag in get_args(variant.model_fields["type"].annotation):
                    model = variant
    return sorted(model.model_fields)


def schema() -> dict[str, Any]:
    """JSON schema of the YAML, for editors and the documentation."""
    return TypeAdapter(Config).json_schema()
