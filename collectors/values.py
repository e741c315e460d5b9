"""OTLP values to Python and JSON, and the coercion of a value to a column's type.

Pure functions. A value that does not fit its column raises ``BadValue``; decode.py decides what becomes of the item.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import orjson
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

MAX_BIGINT = 2**63 - 1

# Element type of the bytes attribute behind a list column, little-endian.
ELEMENTS = {"INTEGER[]": np.dtype("<i4"), "FLOAT[]": np.dtype("<f4"), "BOOLEAN[]": np.dtype("u1")}
_BITS = {"TINYINT": 8, "INTEGER": 32, "BIGINT": 64}


class BadValue(ValueError):
    """A value that its column cannot hold."""


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a dict; the last of a repeated key wins."""
    values: dict[str, Any] = {}
    for pair in pairs:
        value = pair.value
        which = value.WhichOneof("value")
        if which in _SCALARS:
            values[pair.key] = getattr(value, which)
        else:
            values[pair.key] = any_value(value)
    return values


_SCALARS = frozenset({"string_value", "int_value", "double_value", "bool_value", "bytes_value"})


def any_value(value: AnyValue) -> Any:
    """One OTLP value as str, int, float, bool, bytes, list, dict, or None when unset."""
    which = value.WhichOneof("value")
    if which == "array_value":
        return [any_value(item) for item in value.array_value.values]
    if which == "kvlist_value":
        return attributes(value.kvlist_value.values)
    return getattr(value, which) if which in _SCALARS else None


def to_json(value: Any) -> str:
    """JSON text with bytes as ``{"base64": "..."}`` and the numbers JSON lacks as strings ("NaN")."""
    text = orjson.dumps(value, default=_base64).decode()
    # orjson writes null for them.
    return orjson.dumps(_finite(value), default=_base64).decode() if "null" in text else text


def _base64(value: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(value).decode()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def coercion(sql_type: str) -> Callable[[Any], Any]:
    """The function that turns an attribute into a value of a column of ``sql_type``, or raises BadValue.

    List columns come out as little-endian bytes, ready for Arrow.
    """
    if sql_type in _BITS:
        limit = 2 ** (_BITS[sql_type] - 1)
        return lambda value: _integer(value, limit)
    if sql_type in ELEMENTS:
        dtype = ELEMENTS[sql_type]
        return lambda value: _elements(value, dtype)
    return {"DOUBLE": _number, "VARCHAR": _text, "BOOLEAN": _boolean, "JSON": _json_text, "VARCHAR[]": _texts}[sql_type]


def _integer(value: Any, limit: int) -> int:
    if type(value) is not int:
        try:
            number = int(value) if isinstance(value, str) else value
            if isinstance(number, bool) or int(number) != number:
                raise BadValue(f"{value!r} is not an integer")
            value = int(number)
        except (TypeError, ValueError, OverflowError):
            raise BadValue(f"{_short(value)} is not an integer") from None
    if not -limit <= value < limit:
        raise BadValue(f"{value} does not fit the column")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValue(f"{_short(value)} is not a number")
    try:
        return float(value)
    except ValueError:
        raise BadValue(f"{_short(value)} is not a number") from None


def _boolean(value: Any) -> bool:
    if value in (True, False):  # 0 and 1 too
        return bool(value)
    raise BadValue(f"{_short(value)} is not true or false")


def _text(value: Any) -> str:
    """Text; numbers as they print; a list of texts (gen_ai.response.finish_reasons) joined by commas."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, int | float):
        return str(value)
    raise BadValue(f"{_short(value)} is not text")


def _json_text(value: Any) -> str:
    """JSON given as text or as a structured value, re-encoded so that the store accepts it."""
    try:
        return to_json(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        raise BadValue(f"{_short(value)} is not JSON") from None


def _texts(value: Any) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise BadValue(f"{_short(value)} is not a list of texts")


def _elements(value: Any, dtype: np.dtype) -> bytes:
    if isinstance(value, bytes):
        if len(value) % dtype.itemsize:
            raise BadValue(f"{len(value)} bytes are no whole number of {dtype.itemsize}-byte elements")
        return value
    if isinstance(value, list):  # a sender without byte attributes
        try:
            array = np.array(value)
            elements = array.astype(dtype)
        except (TypeError, ValueError, OverflowError):
            raise BadValue(f"{_short(value)} is not an array of {dtype.name}") from None
        if array.ndim == 1 and (dtype.kind == "f" or (elements == array).all()):
            return elements.tobytes()
    raise BadValue(f"{_short(value)} is not an array of {dtype.name}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
