"""What a page shows when there is nothing to show, and the next command in each case."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import streamlit as st

from dashboards.text import escape
from rlinsight.store import Endpoint, is_loopback


def _panel(title: str, *lines: str) -> None:
    st.html(f'<div class="rl-empty"><h3>{title}</h3>{"".join(f"<p>{line}</p>" for line in lines)}</div>')


def no_store(path: Path) -> None:
    """The file does not exist yet."""
    _panel(
        "No store yet",
        f"<code>{escape(path)}</code> does not exist. A run creates it:",
        "<code>rlinsight train configs/quickstart.yaml</code>",
        "This page fills by itself once the run has begun.",
        "Another store: <code>rlinsight dashboard --store PATH</code>",
    )


def no_runs(path: Path) -> None:
    """The store has no run."""
    _panel(
        "The store has no runs",
        f"<code>{escape(path)}</code> is empty. Start one; it appears here by itself:",
        "<code>rlinsight train configs/quickstart.yaml</code>",
    )


def no_run_selected() -> None:
    """Runs exist, none is chosen."""
    _panel("Pick a run", "Choose one above; the newest stands first. The link in the address bar then points to it.")


def unknown_run(run_id: str) -> None:
    """The link names a run this store does not hold."""
    _panel(
        "This store does not hold that run", f"The link asks for <code>{escape(run_id)}</code>. Choose another above."
    )


def no_steps(status: str) -> None:
    """The run has not finished a step."""
    if status == "running":
        _panel("Setting up", "Models, data and workers are loading; curves appear with the first finished step.")
    else:
        _panel("No step was finished", "How the run ended is under Attempts on the Overview page.")


def store_error(error: Exception) -> None:
    """The store could not be read."""
    _panel("The store cannot be read", f"<code>{escape(error)}</code>")


def nothing_matches() -> None:
    """A filter keeps no row."""
    _panel("No rollout matches", "Widen the filters above.")


def no_trace_matches() -> None:
    """A filter keeps no trace."""
    _panel("No trace matches", "Widen the filters above.")


def no_spans(path: Path, endpoint: Endpoint | None) -> None:
    """The store has no span."""
    _panel("No traces yet", "Every run and any OpenTelemetry sender can fill this page.", *_exporter(path, endpoint))


def no_metrics(path: Path, endpoint: Endpoint | None) -> None:
    """The store has no metric point for what is asked."""
    _panel(
        "No metrics here",
        "A run reports its processes and machines unless it has <code>telemetry.system_metrics: false</code>.",
        "It collects an engine's metrics when told where they are:<br>"
        "<code>telemetry.scrape: [{name: engine, url: http://127.0.0.1:8000/metrics}]</code>",
        *_exporter(path, endpoint),
    )


def _exporter(path: Path, endpoint: Endpoint | None) -> list[str]:
    """How to point any OpenTelemetry exporter at this store."""
    if endpoint is None:
        start = f"<code>rlinsight collect --store {escape(path)}</code>"
        return ["Anything else that speaks OTLP can send here, once a collector runs:", start]
    lines = [
        "Anything else that speaks OTLP can send here:",
        f"<code>OTEL_EXPORTER_OTLP_ENDPOINT={escape(endpoint.http)} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf</code>",
        f"or gRPC: <code>OTEL_EXPORTER_OTLP_ENDPOINT=http://{escape(endpoint.grpc)}</code>",
    ]
    if not is_loopback(urlsplit(endpoint.http).hostname or ""):
        lines.append("with the token: <code>OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer …'</code>")
    return lines
