"""How rollouts are sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlinsight.config.base import Section


class NativeSection(Section):
    """The native engine."""

    kv_cache_gib: float = Field(
        default=2.0, gt=0, description="memory of its KV cache, in GiB per worker; taken as it is used on a CPU"
    )
    prefill_tokens: int = Field(
        default=1024, ge=1, description="prompt tokens computed in one pass; running rollouts wait no longer for them"
    )


class VllmSection(Section):
    """vLLM, in the policy worker's process or as servers."""

    kv_cache_gib: float = Field(default=1.0, gt=0, description="memory of vLLM's KV cache, in GiB per replica")
    replicas: int = Field(
        default=1, ge=1, description="servers of engine vllm_server; each policy worker samples from its share of them"
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="GPUs that share a replica of engine vllm_server; untested"
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of a GPU that weights and KV cache may take, in place of kv_cache_gib; untested",
    )
    sleep_level: Literal[1, 2] | None = Field(
        default=None,
        description="around training on a GPU, 1 moves weights to the host and drops the KV cache, 2 drops both; "
        "neither when unset; untested",
    )

    @model_validator(mode="after")
    def _memory(self) -> VllmSection:
        if self.gpu_memory_utilization is not None and self.kv_cache_gib != 1.0:
            raise ValueError(
                f"kv_cache_gib={self.kv_cache_gib:g} has no effect with gpu_memory_utilization; remove one of them"
            )
        return self


def _server(url: str) -> tuple[str, str | None, int, str]:
    """What tells servers apart, however their addresses are written."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1").rstrip("/")


class OpenAISection(Section):
    """Servers with the OpenAI completions protocol that somebody else started; replicas when there are several."""

    urls: list[str] = Field(default_factory=list, description="addresses of the servers, e.g. http://127.0.0.1:8000")
    server: Literal["vllm", "sglang", "other"] = Field(
        default="vllm", description="what runs there; other: whatever returns token ids from /v1/completions"
    )
    model: str | None = Field(default=None, description="model name there; unset takes the only one that is served")
    api_key_env: str | None = Field(default=None, description="environment variable with the bearer token")
    weights: Literal["disk", "none"] = Field(
        default="disk",
        description="how the servers get new weights: disk has them load a safetensors folder, none leaves them the "
        "weights they started with",
    )
    weights_dir: Path | None = Field(
        default=None, description="folder the servers see under the same path; unset: memory of this machine"
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="silence of a server after which a request, or its load of weights, has failed"
    )

    @model_validator(mode="after")
    def _urls_are_usable(self) -> OpenAISection:
        for i, url in enumerate(self.urls):
            try:
                parts = urlsplit(url)
                usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                usable = False
            if not usable or parts.query or parts.fragment:
                raise ValueError(f"urls.{i}={url!r} is no http or https address; write one like http://127.0.0.1:8000")
            if "@" in parts.netloc:
                raise ValueError(f"urls.{i} holds credentials, which would be stored; use api_key_env")
        if len({_server(url) for url in self.urls}) < len(self.urls):
            raise ValueError("urls repeat; name every server once")
        return self

    @model_validator(mode="after")
    def _weights_fit(self) -> OpenAISection:
        if self.server == "other" and self.weights == "disk" and self.urls:
            raise ValueError("weights=disk needs server: vllm or sglang, which can load new weights; set weights: none")
        if self.weights == "none" and self.weights_dir is not None:
            raise ValueError("weights_dir has no effect with weights: none; remove it")
        return self


class RolloutSection(Section):
    """How rollouts are sampled."""

    engine: Literal["native", "vllm", "vllm_server", "openai"] = Field(
        default="native",
        description="rollout engine; native shares the policy's own weights, vllm holds a copy, vllm_server starts "
        "servers, openai asks those of others",
    )
    native: NativeSection = Field(default_factory=NativeSection, description="options of the native engine")
    vllm: VllmSection = Field(default_factory=VllmSection, description="options of vllm and vllm_server")
    openai: OpenAISection = Field(default_factory=OpenAISection, description="options of the openai engine")
    group_size: int = Field(default=8, ge=1, description="rollouts per prompt")
    max_new_tokens: int = Field(default=256, ge=1, description="cap on sampled tokens of a rollout")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature; the same in training")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass")
    top_k: int | None = Field(default=None, ge=1, description="keep the k likeliest tokens; off when unset")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="strings that end a response, besides the end-of-turn token"
    )
    max_batch_size: int = Field(default=256, ge=1, description="rollouts decoded at once per worker")
    exact: Literal["off", "auto", "mkl", "tile"] = Field(
        default="off",
        description="compute the engine's log-probs and the trainer's alike to the last bit; native or vllm, on a "
        "CPU. mkl: MKL's strict mode; tile: products of one shape; true or auto: the first that passes its test at "
        "start",
    )
    request_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="seconds until a request has failed, counted from when it is made: waiting for a place in the "
        "batch is part of it",
    )
    retries: int = Field(
        default=1, ge=0, description="times a failed request is made again, on another replica where there is one"
    )
    on_error: Literal["fail", "drop"] = Field(
        default="fail",
        description="a request that failed for good stops the run, or leaves its rollout out of the update; recorded "
        "in any case",
    )
    on_stale: Literal["alert", "fail"] = Field(
        default="alert",
        description="an engine found to serve other weights than it was given raises an alert, or also stops the run",
    )

    @field_validator("exact", mode="before")
    @classmethod
    def _exact_is_also_a_switch(cls, value: Any) -> Any:
        return {True: "auto", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _engine_options(self) -> RolloutSection:
        if self.engine not in ("native", "vllm") and self.exact != "off":
            raise ValueError(
                f"exact={self.exact} works with engine: native or vllm only, not {self.engine}, whose kernels are not "
                "the trainer's; set exact: off or engine: native"
            )
        # Defaults are let through, so that a resolved config can be loaded again.
        if self.engine != "native" and self.native != NativeSection():
            raise ValueError(f"native has no effect with engine {self.engine}; set engine: native or remove native")
        if self.engine not in ("vllm", "vllm_server") and self.vllm != VllmSection():
            raise ValueError(f"vllm has no effect with engine {self.engine}; set engine: vllm or remove vllm")
        if self.engine != "openai" and self.openai != OpenAISection():
            raise ValueError(f"openai has no effect with engine {self.engine}; set engine: openai or remove openai")
        if self.engine == "openai" and not self.openai.urls:
            raise ValueError("engine openai needs the servers' addresses; set openai.urls: [http://127.0.0.1:8000]")
        if self.openai.weights == "none" and self.on_stale == "fail":
            raise ValueError(
                "on_stale=fail has no effect with openai.weights: none, whose servers are given no weights to be stale "
                "against; set on_stale: alert"
            )
        for option in ("replicas", "tensor_parallel_size"):
            if self.engine == "vllm" and getattr(self.vllm, option) != 1:
                raise ValueError(
                    f"vllm.{option} has no effect with engine vllm, which has one in each policy worker; "
                    f"set engine: vllm_server or remove {option}"
                )
        if self.engine in ("vllm", "vllm_server") and self.temperature < 0.01:
            raise ValueError(
                f"vLLM samples temperature={self.temperature:g} at 0.01; raise temperature or set engine: native"
            )
        return self
