"""The config's sections and the registered functions are two halves of one thing."""

from __future__ import annotations

import pytest

from core_trainer.algorithms import registry
from rlinsight.config.advantage import ADVANTAGES, GROUP_ADVANTAGES
from rlinsight.config.algorithm import AGGREGATIONS
from rlinsight.config.base import Section
from rlinsight.config.correction import TREATMENTS
from rlinsight.config.functions import types_of
from rlinsight.config.kl import KL_ESTIMATORS
from rlinsight.config.policy_loss import ACTIVE_ON_POLICY, POLICY_LOSSES
from rlinsight.config.shaping import GROUP_FILTERS


@pytest.mark.parametrize(
    ("kind", "sections"), [("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES), ("importance", TREATMENTS)]
)
def test_every_function_has_a_section_with_its_options_and_defaults(
    kind: str, sections: tuple[type[Section], ...]
) -> None:
    """What a config may set of a function is what the function takes, and means the same when it is left out."""
    assert set(types_of(sections)) == set(registry.names(kind))
    for name, section in zip(types_of(sections), sections, strict=True):
        defaults = {key: field.default for key, field in section.model_fields.items() if key != "type"}
        assert defaults == dict(registry.find(kind, name).options), section


def test_names_the_config_knows_are_those_there_are() -> None:
    """Neither has a name the other lacks; two filters come with what makes them: dynamic sampling, and comparing."""
    assert set(AGGREGATIONS) == set(registry.names("aggregation"))
    assert set(KL_ESTIMATORS) == set(registry.names("kl_estimator"))
    filters = set(types_of(GROUP_FILTERS))
    assert filters | {"zero_variance", "too_small"} == set(registry.names("group_filter"))


def test_what_the_config_knows_of_functions_follows_from_their_inputs() -> None:
    """Which advantages compare rollouts of a prompt, and which options of losses there are."""
    advantages = {name: registry.find("advantage", name).inputs for name in registry.names("advantage")}
    assert {name for name, inputs in advantages.items() if "groups" in inputs} == GROUP_ADVANTAGES
    for name, options in ACTIVE_ON_POLICY.items():
        assert set(options) <= set(registry.find("policy_loss", name).options)
