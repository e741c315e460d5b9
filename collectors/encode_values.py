"""Python values and JSON columns to OTLP values: the inverse of values.py. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import orjson
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList


def from_json(text: str | None) -> Any:
    """The value of a JSON column."""
    return None if text is None else orjson.loads(text)


def pairs(attributes: Mapping[str, Any] | None) -> list[KeyValue]:
    """Attributes as OTLP has them."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in (attributes or {}).items()]


def any_value(value: Any) -> AnyValue:
    """One value, of the types that decoding gives; ``{"base64": text}`` is bytes."""
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=map(any_value, value)))
    if isinstance(value, dict):
        if value.keys() == {"base64"} and isinstance(value["base64"], str):
            return AnyValue(bytes_value=base64.b64decode(value["base64"]))
        return AnyValue(kvlist_value=KeyValueList(values=pairs(value)))
    return AnyValue()
