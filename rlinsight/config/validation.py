"""What the policy is measured on while it trains, and which of its checkpoints counts as the best."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlinsight.config.base import Section
from rlinsight.config.data import DataSection
from rlinsight.config.reward import RewardSection, TaskReward, component_name
from rlinsight.config.rollout import RolloutSection

ALL = "all"  # what the metrics over every source together are called


class ValidationDataset(Section):
    """Prompts that are never trained on. How they are written, ``data`` says, but for what is set here."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="data source its metrics stand under; the rows' own data_source when unset",
    )
    source: str = Field(description="path to .jsonl or .parquet, or reasoning_gym:<task>")
    task_args: dict[str, object] = Field(
        default_factory=dict, description="keyword arguments of the reasoning_gym task; none are taken from data"
    )
    size: int | None = Field(
        default=None, ge=1, description="prompts to generate (reasoning_gym) or to keep (files); all when unset"
    )
    prompt_column: str | None = Field(default=None, description="as in data when unset")
    answer_column: str | None = Field(default=None, description="as in data when unset")
    system_prompt: str | None = Field(default=None, description="as in data when unset")
    prompt_suffix: str | None = Field(default=None, description="as in data when unset")

    @model_validator(mode="after")
    def _no_idle_options(self) -> ValidationDataset:
        if self.name == ALL:
            raise ValueError(f"name {ALL!r} stands for all sources together; give another")
        generated = self.source.startswith("reasoning_gym:")
        if self.task_args and not generated:
            raise ValueError(
                f"task_args only apply to reasoning_gym:<task>, and source is {self.source!r}; remove task_args"
            )
        for option in ("prompt_column", "answer_column"):
            if generated and getattr(self, option) is not None:
                raise ValueError(f"{option} has no effect with {self.source}: items are generated; remove it")
        return self

    def as_data(self, data: DataSection) -> DataSection:
        """The section that loads it, ``data`` being the training data's."""
        columns = {} if self.source.startswith("reasoning_gym:") else {"prompt_column", "answer_column"}
        inherited = {*columns, "system_prompt", "prompt_suffix"}
        values = {key: getattr(self if getattr(self, key) is not None else data, key) for key in inherited}
        limits = {"max_prompt_tokens": data.max_prompt_tokens, "overlong_prompts": data.overlong_prompts}
        return DataSection(train=self.source, task_args=self.task_args, size=self.size, **values, **limits)


class ValidationSection(Section):
    """Sampling on datasets of its own, beside training: no weight, random number or data position depends on it."""

    datasets: list[ValidationDataset] = Field(min_length=1, description="what to validate on")
    every: int = Field(default=10, ge=1, description="steps between validations; there is one after the last step too")
    before_training: bool = Field(default=True, description="validate the initial weights, as step 0")
    n: int = Field(default=1, ge=1, description="samples per prompt")
    temperature: float = Field(default=0.0, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass")
    top_k: int | None = Field(default=None, ge=1, description="keep the k likeliest tokens; off when unset")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="cap on sampled tokens; as in rollout when unset"
    )
    k: list[int] | None = Field(
        default=None, description="k of pass@k, best@k and maj@k; the powers of two below n, and n, when unset"
    )
    component: str | None = Field(
        default=None, description="reward component that is validated; the reward (their weighted sum) when unset"
    )
    pass_score: float = Field(default=1.0, description="a sample passes (pass@k) when its score is at least this")
    best_metric: str | None = Field(
        default=None,
        description="metric that decides the best checkpoint, as <source>/<metric>, or <metric> over all sources; "
        "mean@n when unset",
    )
    maximize: bool = Field(default=True, description="whether more of best_metric is better")

    @property
    def ks(self) -> list[int]:
        """k of pass@k, best@k and maj@k, ascending."""
        if self.k is not None:
            return sorted(self.k)
        return [*(2**i for i in range((self.n - 1).bit_length())), self.n]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of each source. best@1 and maj@1 would be the mean again."""
        kinds = [(kind, k) for k in self.ks for kind in (("pass", "best", "maj") if k > 1 else ("pass",))]
        return [f"mean@{self.n}", *(f"{kind}@{k}" for kind, k in kinds)]

    @property
    def best(self) -> tuple[str, str]:
        """Source and metric that decide the best checkpoint."""
        source, _, metric = (self.best_metric or f"mean@{self.n}").rpartition("/")
        return source or ALL, metric

    @model_validator(mode="after")
    def _no_idle_options(self) -> ValidationSection:
        for option, off in (("n", 1), ("top_p", 1.0), ("top_k", None)):
            if self.temperature == 0 and getattr(self, option) != off:
                raise ValueError(
                    f"{option}={getattr(self, option)} has no effect with temperature 0, where all samples are equal; "
                    f"set temperature > 0 or remove {option}"
                )
        for k in self.k or []:
            if not 1 <= k <= self.n or self.ks.count(k) > 1:
                raise ValueError(f"k={self.k}: each k must be there once, from 1 to n={self.n}; change k or n")
        return self

    @model_validator(mode="after")
    def _best_metric_is_made(self) -> ValidationSection:
        source, metric = self.best
        if metric not in self.metrics:
            raise ValueError(f"best_metric={self.best_metric!r} is not made here; known: {', '.join(self.metrics)}")
        names = [dataset.name for dataset in self.datasets]
        for name in names:
            if name is not None and names.count(name) > 1:
                raise ValueError(f"two datasets are called {name!r}; give each its own name")
        if source != ALL and None not in names and source not in names:
            raise ValueError(
                f"best_metric={self.best_metric!r} names no dataset; known: {', '.join(str(name) for name in names)}"
            )
        return self

    def check(self, rollout: RolloutSection, reward: RewardSection) -> None:
        """Raise ValueError for what the other sections do not go with."""
        components = [component_name(function) for function in reward.functions]
        if self.component is not None and self.component.partition("/")[0] not in components:
            raise ValueError(
                f"validation.component={self.component!r} is no reward component; known: {', '.join(components)}"
            )
        generated = [dataset.source.startswith("reasoning_gym:") for dataset in self.datasets]
        if any(isinstance(function, TaskReward) for function in reward.functions) and not all(generated):
            raise ValueError(
                "reward type reasoning_gym needs reasoning_gym:<task> as source of each validation dataset, not "
                f"{self.datasets[generated.index(False)].source!r}"
            )
        if rollout.engine in ("vllm", "vllm_server") and 0 < self.temperature < 0.01:
            raise ValueError(
                f"vLLM samples validation.temperature={self.temperature:g} at 0.01; raise it, or set it to 0"
            )
