from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.sdk.resources import Resource

from rlinsight import names
from rlinsight.otlp import FLOAT_ARRAYS, Encoder

ODD = np.array([-0.123456789, 0.0, -0.0, np.nan, -np.inf, -17.000004, 3.000004], "<f4")


def _sent(decimals: int | None, attributes: dict) -> dict[str, bytes]:
    encoder = Encoder(Resource({}), token_decimals=decimals)
    payload = encoder.encode([encoder.record(names.ROLLOUT_TRAINED, 1, attributes)])
    (record,) = ExportLogsServiceRequest.FromString(payload).resource_logs[0].scope_logs[0].log_records
    return {pair.key: pair.value.bytes_value for pair in record.attributes}


@pytest.mark.parametrize("key", sorted(FLOAT_ARRAYS))
def test_floating_arrays_are_rounded_to_the_decimals_asked_for(key):
    """The float32 nearest to the rounded value is sent; NaN, infinities and signed zeros stay; None sends every bit."""
    rounded = np.frombuffer(_sent(5, {key: ODD.tobytes()})[key], "<f4")
    assert rounded.tobytes() == np.array([-0.12346, 0, -0.0, np.nan, -np.inf, -17.0, 3.0], "<f4").tobytes()
    assert _sent(None, {key: ODD.tobytes()})[key] == ODD.tobytes()


def test_rounding_leaves_everything_else_alone():
    """Ids, masks and an array that is cut off are not numbers to round."""
    attributes = {names.TOKEN_IDS: ODD.tobytes(), names.CLIPPED_ARRAY: b"\1\0", names.ENTROPY_ARRAY: b"12345"}
    assert _sent(5, attributes) == attributes


def test_equal_log_probs_stay_equal_and_unequal_ones_differ_by_the_rounding_at_most():
    """What two engines agree on bit for bit agrees after rounding too; no value moves by more than half a unit."""
    values = np.random.default_rng(0).gamma(0.5, 2, 10_000).astype("<f4") * np.float32(-1)
    one = _sent(5, {names.OLD_LOG_PROBS_ARRAY: values.tobytes(), names.ROLLOUT_LOG_PROBS: values.tobytes()})
    assert one[names.OLD_LOG_PROBS_ARRAY] == one[names.ROLLOUT_LOG_PROBS]
    moved = np.abs(np.frombuffer(one[names.ROLLOUT_LOG_PROBS], "<f4").astype(np.float64) - values)
    assert moved.max() < 0.5e-5 + 1e-6  # half a unit, and the step between float32 numbers near -16
