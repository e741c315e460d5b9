"""The YAML of a run as a frozen, closed pydantic tree, one file a section.

Owns: every option, its default, its meaning (the field descriptions feed ``rlinsight config schema`` and the docs) and
every combination that is refused. Loads no torch. A class elsewhere receives its own section, never the whole tree.
"""

from rlinsight.config.algorithm import AlgorithmSection
from rlinsight.config.data import DataSection
from rlinsight.config.loading import load, parse, schema
from rlinsight.config.model import LoraSection, ModelSection
from rlinsight.config.reward import (
    FunctionReward,
    MathVerifyReward,
    NumericReward,
    RegexReward,
    RewardFunction,
    RewardSection,
    TaskReward,
    component_name,
)
from rlinsight.config.rollout import RolloutSection, VllmSection
from rlinsight.config.run import RunSection
from rlinsight.config.telemetry import ScrapeTarget, TelemetrySection
from rlinsight.config.trainer import TrainerSection
from rlinsight.config.tree import Config

__all__ = [
    "AlgorithmSection",
    "Config",
    "DataSection",
    "FunctionReward",
    "LoraSection",
    "MathVerifyReward",
    "ModelSection",
    "NumericReward",
    "RegexReward",
    "RewardFunction",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "ScrapeTarget",
    "TaskReward",
    "TelemetrySection",
    "TrainerSection",
    "VllmSection",
    "component_name",
    "load",
    "parse",
    "schema",
]
