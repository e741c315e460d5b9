"""``python -m collectors --store PATH``: run a collector in this process."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

from rlinsight.errors import RlinsightError
from rlinsight.priority import yield_processors


class _NoPandas(MetaPathFinder):
    """pyarrow and DuckDB import pandas wherever it is installed: 50 MB of memory that nothing here uses."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a collector does without pandas", name=fullname)


def main() -> int:
    """Returns the exit code: 0 after an orderly end, 1 with one line on stderr when it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m collectors", description="Receive OTLP into a DuckDB store.")
    parser.add_argument("--store", type=Path, required=True, help="DuckDB file; created when missing")
    parser.add_argument(
        "--owner-pid", type=int, action="append", default=[], help="leave when these processes are gone; repeatable"
    )
    parser.add_argument("--listen", default="127.0.0.1", help="address to bind; others than loopback need the token")
    parser.add_argument("--token-file", type=Path, help="keeps the token across restarts; made when missing")
    for name in ("http", "grpc", "sql"):
        parser.add_argument(f"--{name}-port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--keep-days", type=float, help="remove runs not heard of for longer")
    parser.add_argument("--keep-bytes", type=int, help="remove the oldest runs while the store uses more")
    parser.add_argument("--background", action="store_true", help="leave the processors to training once it serves")
    parser.add_argument("--at-once", action="store_true", help="leave them while it starts, too")
    args = parser.parse_args()
    if args.at_once:
        yield_processors(whole_process=True)  # and so do the threads it will start
    logging.basicConfig(level=logging.INFO, format="collector: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    sys.meta_path.insert(0, _NoPandas())
    try:
        from collectors import process, retention

        listen = process.Listen(args.listen, args.http_port, args.grpc_port, args.sql_port, args.token_file)
        keep = retention.Keep(args.keep_days, args.keep_bytes)
        process.run(args.store, args.owner_pid, listen, keep, args.background)
    except RlinsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # all is closed by now, but a thread of Quack's may be in a statement: C++ would abort under it
