"""What is recorded and where it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ByteSize, Field, field_validator, model_validator

from rlinsight import DEFAULT_STORE
from rlinsight.config.base import Section


class ScrapeTarget(Section):
    """An endpoint in Prometheus' or OpenMetrics' text format, e.g. of a rollout engine's server."""

    url: str = Field(description="http or https address, e.g. http://127.0.0.1:8000/metrics")
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=100, description="service.name of its metrics")
    interval_s: float = Field(default=5.0, ge=0.1, le=3600, description="time between two scrapes")
    labels: dict[str, str] = Field(default_factory=dict, description="resource attributes of its metrics")

    @model_validator(mode="after")
    def _url_is_usable(self) -> ScrapeTarget:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(
                f"url={self.url!r} is no http or https address; write one like http://127.0.0.1:8000/metrics"
            )
        if "@" in urlsplit(self.url).netloc:
            raise ValueError("url holds credentials, which would be stored; scrape an address that needs none")
        return self


class TelemetrySection(Section):
    """What is recorded and where it is stored."""

    enabled: bool = Field(default=True, description="false trains without a record: no collector, nothing stored")
    store: Path = Field(default=DEFAULT_STORE, description="DuckDB file of all runs")
    text: Literal["full", "redacted", "off"] = Field(
        default="full", description="capture of prompts and responses; redacted keeps lengths and hashes only"
    )
    token_arrays: bool = Field(
        default=True, description="record token ids, log-probs, entropy and masks of every token"
    )
    token_decimals: int | None = Field(
        default=5,
        ge=1,
        le=7,
        description="decimals kept of log-probs, entropy and advantages of tokens, which take a fourth more on disk "
        "without rounding; null keeps every bit",
    )
    spool_bytes: int = Field(
        default=2 * 1024**3, ge=1024**2, description="cap on undelivered telemetry on disk, per process"
    )
    metrics_interval_s: float = Field(
        default=5.0, ge=0.1, le=3600, description="time between two collections of metrics, in every process"
    )
    system_metrics: bool = Field(
        default=True, description="CPU, memory, disk, network and GPUs of every process and machine"
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="the collector this run starts removes runs not heard of for so many days; null keeps them all",
    )
    keep_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="the collector this run starts removes the oldest runs while the store uses more, e.g. 200GB",
    )
    scrape: list[ScrapeTarget] = Field(
        default_factory=list, description="metrics endpoints the collector scrapes while the run lasts"
    )

    @field_validator("text", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads an unquoted off

    @model_validator(mode="after")
    def _no_idle_options(self) -> TelemetrySection:
        fields = type(self).model_fields.items()
        changed = [
            name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        idle = sorted(set(changed) - {"enabled", "store"})
        if idle and not self.enabled:
            raise ValueError(f"enabled=false records nothing; remove {', '.join(idle)}, or enable it")
        return self

    @model_validator(mode="after")
    def _target_names_differ(self) -> TelemetrySection:
        names = [target.name for target in self.scrape]
        if len(set(names)) < len(names):
            raise ValueError(f"scrape names {', '.join(names)} repeat; give each target a name of its own")
        return self
