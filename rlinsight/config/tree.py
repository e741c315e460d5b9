"""The whole config, and the combinations of sections that are refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field, model_validator

from rlinsight.config.advantage import GROUP_ADVANTAGES
from rlinsight.config.algorithm import AlgorithmSection
from rlinsight.config.base import Section
from rlinsight.config.data import DataSection
from rlinsight.config.kl import AdaptiveController
from rlinsight.config.model import ModelSection
from rlinsight.config.reward import RewardSection, TaskReward, component_name
from rlinsight.config.rollout import RolloutSection
from rlinsight.config.run import RunSection
from rlinsight.config.shaping import OVERLONG
from rlinsight.config.telemetry import TelemetrySection
from rlinsight.config.trainer import TrainerSection
from rlinsight.config.validation import ValidationSection


class Config(Section):
    """The whole run."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = Field(default_factory=lambda: AlgorithmSection.model_validate({}))
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    validation: ValidationSection | None = Field(default=None, description="none when unset")
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)

    @model_validator(mode="before")
    @classmethod
    def _exact_defaults(cls, tree: Any) -> Any:
        """Exact mode computes in float32, and records log-probs whole: rounded, the store could not show it."""
        rollout = tree.get("rollout") if isinstance(tree, dict) else None
        if not isinstance(rollout, dict) or rollout.get("exact", "off") in (False, "off"):
            return tree
        tree = dict(tree)
        if isinstance(model := tree.get("model"), dict):
            tree["model"] = {"compute_dtype": "float32"} | model
        if isinstance(telemetry := tree.get("telemetry", {}), dict) and telemetry.get("enabled", True):
            tree["telemetry"] = {"token_decimals": None} | telemetry
        return tree

    @model_validator(mode="after")
    def _exact_mode(self) -> Config:
        exact = self.rollout.exact
        if exact == "off":
            return self
        if self.telemetry.enabled and self.telemetry.token_decimals is not None:
            raise ValueError(
                f"telemetry.token_decimals={self.telemetry.token_decimals} rounds what rollout.exact={exact} keeps "
                "equal to the last bit; remove token_decimals"
            )
        if self.rollout.engine == "vllm":
            if self.model.lora is not None:
                raise ValueError(
                    f"rollout.exact={exact} with rollout.engine: vllm works without adapters, which vLLM gets merged; "
                    "remove model.lora, or set rollout.engine: native and model.lora.sync: adapter"
                )
            if self.model.compute_dtype != "float32":
                raise ValueError(
                    f"rollout.exact={exact} with rollout.engine: vllm computes in float32, as vLLM's norms keep sums "
                    f"unrounded; model.compute_dtype={self.model.compute_dtype} needs rollout.engine: native"
                )
        if self.model.lora is not None and self.model.lora.sync == "merged":
            raise ValueError(
                f"rollout.exact={exact} needs adapters computed as training computes them; set model.lora.sync: adapter"
            )
        if exact == "mkl" and self.model.compute_dtype != "float32":
            raise ValueError(
                "rollout.exact=mkl computes in float32, as MKL's strict mode has no bfloat16; "
                f"model.compute_dtype={self.model.compute_dtype} needs rollout.exact: tile"
            )
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        algorithm = self.algorithm
        if self.rollout.group_size < 2 and algorithm.advantage.type in GROUP_ADVANTAGES:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} with algorithm.advantage {algorithm.advantage.type} "
                "leaves a rollout nothing to be compared with; set rollout.group_size >= 2"
            )
        if self.rollout.group_size < 2 and algorithm.shaping.dynamic_sampling is not None:
            raise ValueError(
                "algorithm.shaping.dynamic_sampling drops every group of one rollout; set rollout.group_size >= 2 or "
                "dynamic_sampling: null"
            )
        overlong = algorithm.shaping.overlong
        if overlong is not None and (overlong.buffer or 0) > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.shaping.overlong.buffer={overlong.buffer} is over "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}; lower it"
            )
        if self.model.lora is not None and self.model.lora.sync == "adapter" and self.rollout.engine != "native":
            raise ValueError(
                f"model.lora.sync=adapter works with rollout.engine: native only, not {self.rollout.engine}; "
                "set model.lora.sync: merged"
            )
        replicas, workers = self.rollout.vllm.replicas, self.trainer.num_workers
        if self.rollout.engine == "vllm_server" and replicas < workers:
            raise ValueError(
                f"rollout.vllm.replicas={replicas} with trainer.num_workers={workers} leaves a worker none to sample "
                f"from; set replicas >= {workers}"
            )
        if overlong is not None and OVERLONG in [component_name(function) for function in self.reward.functions]:
            raise ValueError(
                f"a reward function is called {OVERLONG!r}, as the penalty of algorithm.shaping.overlong is; give it "
                "another name:"
            )
        rollouts = self.trainer.prompts_per_step * self.rollout.group_size
        controller = algorithm.kl.controller if algorithm.kl is not None else None
        if isinstance(controller, AdaptiveController) and controller.horizon < rollouts:
            raise ValueError(
                f"algorithm.kl.controller.horizon={controller.horizon} is below the {rollouts} rollouts of a step, so "
                "one step could undo the coefficient; raise it"
            )
        if self.trainer.prompts_per_step < algorithm.num_mini_batches:
            raise ValueError(
                f"algorithm.num_mini_batches={algorithm.num_mini_batches} with "
                f"trainer.prompts_per_step={self.trainer.prompts_per_step} leaves a mini-batch empty; lower "
                "num_mini_batches or raise trainer.prompts_per_step"
            )
        critic, trainer = algorithm.model_critic, self.trainer
        if critic is not None and critic.warmup_steps:
            left = trainer.total_steps - critic.warmup_steps
            if left < 1:
                raise ValueError(
                    f"algorithm.critic.warmup_steps={critic.warmup_steps} of trainer.total_steps={trainer.total_steps} "
                    "leaves the policy no step; lower it or raise total_steps"
                )
            if trainer.lr_schedule != "constant" and trainer.warmup_steps >= left:
                raise ValueError(
                    f"trainer.lr_schedule={trainer.lr_schedule} never begins: algorithm.critic.warmup_steps="
                    f"{critic.warmup_steps} of total_steps={trainer.total_steps} leave the policy {left}, and "
                    f"trainer.warmup_steps={trainer.warmup_steps}; lower either or set lr_schedule: constant"
                )
        if self.validation is not None:
            self.validation.check(self.rollout, self.reward)
            for option, unset in (("best_metric", None), ("maximize", True)):
                if not self.trainer.keep_best and getattr(self.validation, option) != unset:
                    raise ValueError(
                        f"validation.{option} has no effect without trainer.keep_best, as it decides which checkpoint "
                        f"is kept; set trainer.keep_best: true or remove {option}"
                    )
        elif self.trainer.keep_best:
            raise ValueError(
                "trainer.keep_best has no effect without validation; add a validation section or remove it"
            )
        uses_task = any(isinstance(function, TaskReward) for function in self.reward.functions)
        if uses_task and not self.data.train.startswith("reasoning_gym:"):
            raise ValueError(
                f"reward type reasoning_gym needs data.train: reasoning_gym:<task>, not {self.data.train!r}"
            )
        return self

    @property
    def longest_response(self) -> int:
        """Most tokens a response may have, validation's included."""
        validation = self.validation.max_new_tokens if self.validation is not None else None
        return max(self.rollout.max_new_tokens, validation or 0)

    def hash(self) -> str:
        """sha256 over the resolved values, so equal settings give equal hashes."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
