"""rlinsight: RL post-training for language models, built observability-first.

``rlinsight.train(config)`` trains a model. ``rlinsight.query(sql)`` asks a store, live or at rest, and returns an Arrow
table; ``rlinsight.connect()`` gives a DuckDB connection to it. Importing this package loads no torch, ray, duckdb or
streamlit.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinsight import otel_env

if TYPE_CHECKING:
    from rlinsight.api import train
    from rlinsight.attach import connect
    from rlinsight.store import query

__all__ = ["DEFAULT_STORE", "__version__", "connect", "query", "train"]
__version__ = "0.1.0"
DEFAULT_STORE = Path("runs/rlinsight.duckdb")  # where a run is recorded and readers look, unless told otherwise

otel_env.repair()  # before anything imports OpenTelemetry


def __getattr__(name: str) -> Any:
    if name == "query":
        from rlinsight.store import query

        return query
    if name == "connect":
        from rlinsight.attach import connect

        return connect
    if name == "train":
        from rlinsight.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
