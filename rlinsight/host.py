"""Where a run runs and with which code: the facts of the run.start event. Each is None when unknown."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from rlinsight import __version__

REPORTED_PACKAGES = ("torch", "transformers", "ray", "duckdb", "opentelemetry-sdk", "pyarrow", "numpy")


def facts() -> dict[str, Any]:
    """Host name, cores this process may use, memory, platform and library versions."""
    import psutil

    return {
        "hostname": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in REPORTED_PACKAGES},
    }


def code_version() -> str:
    """``0.1.0``, or ``0.1.0+<commit>`` in a checkout, with ``.dirty`` when tracked files were changed."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return __version__
    described = _git(root, "describe", "--always", "--dirty=.dirty", "--abbrev=12", "--exclude=*")
    return f"{__version__}+{described}" if described else __version__


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
