"""The YAML of a run as a frozen, closed pydantic tree, one file a section.

Owns: every option, its default, its meaning (the field descriptions feed ``rlinsight config schema`` and the docs) and
every combination that is refused. Loads no torch. A class elsewhere receives its own section, never the whole tree.
"""

from rlinsight.config.algorithm import AlgorithmSection
from rlinsight.config.data import DataSection
from rlinsight.config.loading import load, parse, schema
from rlinsight.config.model import LoraSection, ModelSection
from rlinsight.config.reward import (
    ClassifierReward,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathVerifyReward,
    NumericReward,
    RegexReward,
    RewardFunction,
    RewardSection,
    TaskReward,
    component_name,
)
from rlinsight.config.rollout import NativeSection, OpenAISection, RolloutSection, VllmSection
from rlinsight.config.run import RunSection
from rlinsight.config.sft import SftConfig, SftDataSection, SftTrainerSection
from rlinsight.config.telemetry import ScrapeTarget, TelemetrySection
from rlinsight.config.trainer import TrainerSection
from rlinsight.config.tree import Config
from rlinsight.config.validation import ValidationDataset, ValidationSection

__all__ = [
    "AlgorithmSection",
    "ClassifierReward",
    "Config",
    "DataSection",
    "FunctionReward",
    "JudgeReward",
    "LengthReward",
    "LoraSection",
    "MathVerifyReward",
    "ModelSection",
    "NativeSection",
    "NumericReward",
    "OpenAISection",
    "RegexReward",
    "RewardFunction",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "ScrapeTarget",
    "SftConfig",
    "SftDataSection",
    "SftTrainerSection",
    "TaskReward",
    "TelemetrySection",
    "TrainerSection",
    "ValidationDataset",
    "ValidationSection",
    "VllmSection",
    "component_name",
    "load",
    "parse",
    "schema",
]
