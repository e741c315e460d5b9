"""The command line that serves the dashboard.

Owns the Streamlit settings; starts no process itself. Light to import: the CLI reads it without loading Streamlit.
"""

from __future__ import annotations

import sys
from pathlib import Path

APP = Path(__file__).with_name("app.py")

SETTINGS = {
    "server.headless": "true",  # no e-mail prompt, no browser opened on a machine without one
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",  # a bug in a page is logged on the server, never drawn as a traceback
    "theme.baseFontSize": "14",
    "theme.baseRadius": "small",
    "theme.light.primaryColor": "#2f6fb0",
    "theme.dark.primaryColor": "#3d85c6",
    "theme.light.backgroundColor": "#ffffff",
    "theme.light.secondaryBackgroundColor": "#f5f6f8",
    "theme.light.textColor": "#1f2630",
    "theme.light.borderColor": "#e1e4e9",
    "theme.dark.backgroundColor": "#14171c",
    "theme.dark.secondaryBackgroundColor": "#1d2128",
    "theme.dark.textColor": "#dfe3e9",
    "theme.dark.borderColor": "#2d333d",
}


def command(store: Path, port: int = 8501, host: str = "127.0.0.1") -> list[str]:
    """Argument list that serves the dashboard of ``store`` on ``http://host:port`` until it is signalled."""
    settings = SETTINGS | {"server.port": str(port), "server.address": host, "browser.serverAddress": host}
    flags = [f"--{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "streamlit", "run", str(APP), *flags, "--", "--store", str(store)]
