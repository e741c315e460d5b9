from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dashboards import launch


def test_command_serves_the_store_on_loopback() -> None:
    """The command names this Python, the store and the address, and sends no usage statistics."""
    command = launch.command(Path("x/y.duckdb"), 9001)
    assert command[0] == sys.executable
    assert command[-2:] == ["--store", "x/y.duckdb"]
    assert {"--server.address=127.0.0.1", "--server.port=9001", "--browser.gatherUsageStats=false"} <= set(command)


def test_importing_launch_is_light() -> None:
    """The CLI can build the command without loading Streamlit, pandas or Plotly."""
    code = "import sys, dashboards.launch; print({'streamlit', 'pandas', 'plotly', 'duckdb'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "set()"
