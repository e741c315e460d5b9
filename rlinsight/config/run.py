"""Names, places and the seed of a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rlinsight.config.base import Section


class RunSection(Section):
    """What the run is called and where its files go."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9._-]+$", description="run name; part of the run id and its folder"
    )
    project: str = Field(default="default", description="groups runs in the dashboard")
    dir: Path = Field(
        default=Path("runs"), description="folder of runs: <dir>/<run id>/ holds checkpoints, config and spool"
    )
    seed: int = Field(default=1, ge=0, lt=2**31, description="seeds data order and sampling")
