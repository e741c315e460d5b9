"""Environment variables of OpenTelemetry that its SDK would fail on, taken out before anything imports it.

A count limit that is no number raises while ``opentelemetry.sdk.trace`` is imported, an unknown provider whenever a
global provider is looked up: neither may stop a run. What can be honoured, or is overridden in providers.py, stays.
"""

from __future__ import annotations

import logging
import os
import re

_LIMIT = re.compile(r"OTEL_\w+_LIMIT")
_PROVIDER = re.compile(r"OTEL_PYTHON_(TRACER|METER|LOGGER)_PROVIDER")

_log = logging.getLogger(__name__)


def repair() -> None:
    """Remove what is unusable from the environment of this process and its children, with a warning each."""
    for name, value in list(os.environ.items()):
        if _LIMIT.fullmatch(name):
            usable = not value or value.strip().isdecimal()
            wanted = "a number"
        elif match := _PROVIDER.fullmatch(name):
            from importlib.metadata import entry_points

            group = f"opentelemetry_{match[1].lower()}_provider"
            usable = bool(entry_points(group=group, name=value))
            wanted = f"an installed {group}"
        else:
            continue
        if not usable:
            del os.environ[name]
            _log.warning("%s=%r is ignored: it is not %s", name, value, wanted)
