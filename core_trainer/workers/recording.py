"""The event that says what an update consumed, the same from every worker that trains."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from core_trainer.batching import TrainSample
from rlinsight import names, telemetry


def record_trained(
    sample: TrainSample,
    policy_version: int,
    found: Mapping[str, np.ndarray] | None = None,
    clipped: np.ndarray | None = None,
) -> None:
    """One event per turn of a sample that an update consumed: its advantage and per-token arrays.

    ``found`` [T] by name of the event's attribute are what the update itself computed, ``clipped`` [T] bool the tokens
    whose gradient it cut.
    """
    assert sample.advantages is not None, "advantages come before the update"
    floats = {
        names.OLD_LOG_PROBS_ARRAY: sample.old_log_probs,
        names.REF_LOG_PROBS_ARRAY: sample.ref_log_probs,
        names.ADVANTAGES_ARRAY: sample.advantages,
        names.WEIGHTS_ARRAY: sample.weights,
        names.VALUES_ARRAY: sample.values,
        names.RETURNS_ARRAY: sample.returns,
        **(found or {}),
    }
    flags = {names.LOSS_MASK: sample.loss_mask, names.CLIPPED_ARRAY: clipped}
    arrays = {name: array.astype("<f4") for name, array in floats.items() if array is not None}
    arrays |= {name: array.astype("u1") for name, array in flags.items() if array is not None}
    for index, start, end in sample.turns:
        telemetry.event(
            names.ROLLOUT_TRAINED,
            {
                names.ROLLOUT_ID: sample.rollout_id,
                names.TURN_INDEX: index,
                names.POLICY_VERSION: policy_version,
                names.ADVANTAGE: float(sample.advantages[start]),
                **{name: array[start:end].tobytes() for name, array in arrays.items()},
            },
            carrier=sample.carrier,
        )
