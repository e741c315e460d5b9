"""Rows to Arrow tables, one column at a time. List columns come as bytes and are never touched element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from collectors.values import ELEMENTS

_TYPES = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "UBIGINT": pa.uint64(),
    "DOUBLE": pa.float64(),
    "DOUBLE[]": pa.list_(pa.float64()),
    "UBIGINT[]": pa.list_(pa.uint64()),
    "VARCHAR[]": pa.list_(pa.string()),
}


def table(rows: Sequence[tuple], types: Mapping[str, str]) -> pa.Table:
    """Rows of a table whose columns have these SQL types, in that order."""
    arrays = [
        _array(column, sql_type) for column, sql_type in zip(zip(*rows, strict=True), types.values(), strict=True)
    ]
    return pa.table(dict(zip(types, arrays, strict=True)))


def _array(column: Sequence, sql_type: str) -> pa.Array:
    if sql_type not in ELEMENTS:
        arrow_type = _TYPES[sql_type]
        # Most columns of most rows are NULL, and finding that out is a tenth of converting them.
        return pa.nulls(len(column), arrow_type) if _all_none(column) else pa.array(column, arrow_type)
    dtype = ELEMENTS[sql_type]
    offsets = np.zeros(len(column) + 1, dtype=np.int32)
    np.cumsum([len(item) // dtype.itemsize if item is not None else 0 for item in column], out=offsets[1:])
    elements = np.frombuffer(b"".join(item for item in column if item is not None), dtype)
    values = pa.array(elements != 0) if sql_type == "BOOLEAN[]" else pa.array(elements)
    mask = pa.array([item is None for item in column], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _all_none(column: Sequence) -> bool:
    return column[0] is None and column[-1] is None and column.count(None) == len(column)
