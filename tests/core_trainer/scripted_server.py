"""A server of a tiny model that speaks as vLLM, llama.cpp or SGLang do, tells the truth, and fails as scripted.

Its tokens and log-probs come from a real model, one token at a time; new weights are really loaded.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

Style = Literal["vllm", "placeholders", "llama.cpp", "text", "sglang"]


@dataclass(frozen=True)
class Fault:
    """What is wrong with one answer."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "as scripted"
    after_s: float = 0.0  # before it says anything
    token_s: float = 0.0  # before each token
    drop_after: int | None = None  # tokens, then the connection breaks
    end_after: int | None = None  # tokens, then the answer ends properly without a finish reason
    fail_after: int | None = None  # tokens, then an event tells of an error
    first_log_prob: Any = "true"  # in place of the first token's
    missing_log_probs: int = 0
    first_token: int | None = None  # in place of the sampled one
    counted_more: int = 0  # tokens the usage counts beyond those returned
    prompt_more: int = 0
    not_json: bool = False
    finish_reason: str | None = None


@dataclass
class Asked:
    """One request as it came in."""

    path: str
    headers: dict[str, str]
    body: Any


class ScriptedServer:
    """``script`` has a fault or None for each request of a rollout to come; without any left it answers properly."""

    def __init__(
        self,
        directory: Path,
        style: Style = "vllm",
        log_probs: Literal["processed", "raw", "whole"] = "whole",
        max_model_len: int | None = 512,
        api_key: str | None = None,
        names: Sequence[str] = ("tiny",),
        knows_stop_tokens: bool = True,
        dev_mode: bool = True,
    ) -> None:
        """``log_probs``: after the temperature and truncation; before both; or after the temperature alone."""
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.style, self.log_probs, self.max_model_len = style, log_probs, max_model_len
        self.api_key, self.names, self.knows_stop_tokens = api_key, names, knows_stop_tokens
        self.dev_mode = dev_mode  # whether it has the paths that change weights
        self.script: list[Fault | None] = []
        self.asked: list[Asked] = []
        self.hung_up = 0  # answers whose client went away
        self.refuses_weights = False  # answers 500 when given new ones
        self.ignores_weights = False  # says it took them
        self.slow: dict[str, float] = {}  # seconds before a path answers
        self.paused = False
        self.pause_mode: str | None = None  # while it is paused
        self.streaming = self.held = 0  # streams under way; of those, kept from going on
        self.turn = threading.Condition()
        self.loads = 0
        self.url = ""
        self.lock = threading.Lock()

    def of(self, path: str) -> list[Asked]:
        """Requests of a path."""
        return [asked for asked in self.asked if asked.path == path]

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        """Serves on a port of loopback inside the block."""
        self.start()
        try:
            yield self
        finally:
            self.die()

    def start(self, port: int = 0) -> None:
        """Begin to listen."""
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (_Handler,), {"owner": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()

    @torch.no_grad()
    def sample(
        self, prompt: Sequence[int], options: dict[str, Any]
    ) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        """Token, log-prob and the likeliest words, one token after the other."""
        tokens, generator = list(prompt), torch.Generator().manual_seed(options["seed"])
        for _ in range(options["max_tokens"]):
            if self._is_ended():
                return
            with self.lock:
                logits = self.model(torch.tensor([tokens])).logits[0, -1]
            temperature = options["temperature"]
            scaled = logits / (temperature or 1.0)
            kept = scaled
            if options["top_k"] > 0:
                kept = kept.masked_fill(kept < kept.topk(options["top_k"]).values[-1], -torch.inf)
            if options["top_p"] < 1:
                order = kept.sort(descending=True)
                before = order.values.softmax(0).cumsum(0) - order.values.softmax(0)
                kept = kept.index_fill(0, order.indices[before > options["top_p"]], -torch.inf)
            chosen = torch.multinomial(kept.softmax(0), 1, generator=generator) if temperature else kept.argmax()[None]
            reported = {"raw": logits, "processed": kept, "whole": scaled}[self.log_probs].log_softmax(0)
            top = reported.topk(max(options["top"], 1))
            likeliest = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))[: options["top"]]
            tokens.append(int(chosen))
            yield int(chosen), float(reported[chosen]), likeliest
            if int(chosen) in options["stop"] and self.knows_stop_tokens:
                return

    def _is_ended(self) -> bool:
        """Before each token: whether a pause ends the answer here; one that keeps it is waited out."""
        with self.turn:
            if self.pause_mode == "keep":
                self.held += 1
                self.turn.notify_all()
                self.turn.wait_for(lambda: self.pause_mode is None)
                self.held -= 1
            return self.pause_mode == "abort"

    def pause(self, mode: str) -> None:
        """Returns when no answer goes on."""
        with self.turn:
            self.paused, self.pause_mode = True, mode
            self.turn.wait_for(lambda: self.streaming == (self.held if mode == "keep" else 0), 10)

    def resume(self) -> None:
        """Those that are held go on."""
        with self.turn:
            self.paused, self.pause_mode = False, None
            self.turn.notify_all()

    def load(self, file: Path) -> None:
        """Take new weights from a safetensors file."""
        self.loads += 1
        if self.refuses_weights:
            raise RuntimeError("no weights today")
        if not self.ignores_weights:
            with self.lock:
                self.model.load_state_dict(load_file(file), strict=False)
                self.model.tie_weights()


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self._accept(None):
            names, longest = self.owner.names, self.owner.max_model_len
            self._answer({"data": [{"id": name, "max_model_len": longest} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        if not self._accept(body):
            return
        path = self.path.partition("?")[0]
        time.sleep(self.owner.slow.get(path, 0.0))
        if not self.owner.dev_mode and path != "/v1/completions":
            self._answer({"detail": "Not Found"}, 404)
        elif (body or {}).get("method") == "rlinsight_start":
            self._answer({"results": [None]})
        elif path in ("/v1/completions", "/generate"):
            self._tokens(body)
        elif path in ("/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up"):
            if path == "/pause":
                self.owner.pause(self.path.rpartition("mode=")[2])
            elif path == "/resume":
                self.owner.resume()
            self._answer({"status": "ok"})
        elif path in ("/collective_rpc", "/update_weights_from_disk"):
            try:
                if body.get("method") == "rlinsight_load_shared":
                    self.owner.load(Path(body["args"][0]))
                else:
                    folder = body["model_path"] if "model_path" in body else body["kwargs"]["weights_path"]
                    self.owner.load(Path(folder) / "model.safetensors")
                self._answer({"success": True, "results": [None]})
            except RuntimeError as error:
                self._answer({"success": False, "message": str(error)}, 500 if path == "/collective_rpc" else 200)
        else:
            self._answer({"detail": "Not Found"}, 404)

    def _accept(self, body: Any) -> bool:
        owner = self.owner
        headers = {key.lower(): value for key, value in self.headers.items()}
        owner.asked.append(Asked(self.path.partition("?")[0], headers, body))
        if owner.api_key and headers.get("authorization") != f"Bearer {owner.api_key}":
            self._answer({"error": "Unauthorized"}, 401)
            return False
        return True

    def _answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        text = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _tokens(self, body: dict[str, Any]) -> None:
        scripted = self.owner.script and "x-request-id" in self.headers  # which a probe has not
        fault = (self.owner.script.pop(0) if scripted else None) or Fault()
        time.sleep(fault.after_s)
        if fault.status != 200:
            self._answer({"error": {"message": fault.message}}, fault.status, fault.headers)
            return
        if fault.not_json:
            self._answer("<html>")
            return
        try:
            self._stream(body, fault) if body["stream"] else self._whole(body, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.owner.hung_up += 1

    def _sampled(self, body: dict[str, Any], fault: Fault) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        own = body.get("sampling_params", body)
        options = {
            "max_tokens": own.get("max_tokens", own.get("max_new_tokens")),
            "temperature": own["temperature"],
            "top_k": own["top_k"],
            "top_p": own["top_p"],
            "seed": own.get("seed", own.get("sampling_seed")),
            "stop": own["stop_token_ids"],
            "top": body.get("logprobs", body.get("top_logprobs_num")),
        }
        for i, (token, log_prob, top) in enumerate(self.owner.sample(self._prompt(body), options)):
            time.sleep(fault.token_s)
            if i == 0 and fault.first_token is not None:
                token = fault.first_token
            if i == 0 and fault.first_log_prob != "true":
                log_prob = fault.first_log_prob
            yield token, log_prob, top

    @staticmethod
    def _prompt(body: dict[str, Any]) -> list[int]:
        return body["prompt"] if "prompt" in body else body["input_ids"]

    def _whole(self, body: dict[str, Any], fault: Fault) -> None:
        sampled = list(self._sampled(body, fault))
        if fault.drop_after is not None:
            self.close_connection = True
            return
        self._answer(self._event(body, fault, sampled, sampled, self._reason(body, fault, sampled)))

    def _stream(self, body: dict[str, Any], fault: Fault) -> None:
        with self.owner.turn:
            self.owner.streaming += 1
        try:
            self._events(body, fault)
        finally:
            with self.owner.turn:
                self.owner.streaming -= 1
                self.owner.turn.notify_all()

    def _events(self, body: dict[str, Any], fault: Fault) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        so_far: list[Any] = []
        for each in self._sampled(body, fault):
            if fault.drop_after == len(so_far):
                self.close_connection = True  # without the chunk that ends a body
                return
            if fault.fail_after == len(so_far):
                self._chunk({"error": {"message": fault.message}})
                break
            if fault.end_after == len(so_far):
                break
            so_far.append(each)
            self._chunk(self._event(body, fault, [each], so_far, None))
        else:
            self._chunk(self._event(body, fault, [], so_far, self._reason(body, fault, so_far)))
        self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, content: Any) -> None:
        text = f"data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n".encode()
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    @staticmethod
    def _reason(body: dict[str, Any], fault: Fault, sampled: list[Any]) -> str:
        own = body.get("sampling_params", body)
        if len(sampled) < own.get("max_tokens", own.get("max_new_tokens")):
            return fault.finish_reason or ("stop" if sampled and sampled[-1][0] in own["stop_token_ids"] else "abort")
        return fault.finish_reason or ("stop" if sampled[-1][0] in own["stop_token_ids"] else "length")

    def _event(
        self, body: dict[str, Any], fault: Fault, new: list[Any], so_far: list[Any], reason: str | None
    ) -> dict[str, Any]:
        tokens = [token for token, _, _ in new]
        log_probs = [log_prob for _, log_prob, _ in new][: len(new) - fault.missing_log_probs]
        counts = {
            "prompt_tokens": len(self._prompt(body)) + fault.prompt_more,
            "completion_tokens": len(so_far) + fault.counted_more,
        }
        if self.owner.style == "sglang":
            rows = [[log_prob, token, None] for token, log_prob, _ in so_far]  # all of them, each time
            tops = [[[x, token, None] for token, x in top] for _, _, top in so_far]
            meta = {"output_token_logprobs": rows, "output_top_logprobs": tops, "cached_tokens": 3, **counts}
            return {"text": "", "meta_info": meta | {"finish_reason": {"type": reason} if reason else None}}
        choice: dict[str, Any] = {"index": 0, "text": "a\u2028b" if new else "", "finish_reason": reason}
        if self.owner.style == "llama.cpp":
            tops = [[{"id": token, "logprob": x} for token, x in top] for _, _, top in new]
            choice["logprobs"] = {
                "content": [
                    {"id": token, "logprob": x, "top_logprobs": top}
                    for token, x, top in zip(tokens, log_probs, tops, strict=True)
                ]
            }
        else:
            as_ids = self.owner.style != "text" and body.get("return_tokens_as_token_ids")
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" if as_ids else "word" for token in tokens],
                "token_logprobs": log_probs,
                "top_logprobs": [{f"token_id:{token}": x for token, x in top} for _, _, top in new],
            }
        if self.owner.style == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        event = {"choices": [choice]}
        if reason is not None:
            event["usage"] = counts
            if self.owner.style != "llama.cpp":
                event["usage"] |= {"prompt_tokens_details": {"cached_tokens": 3}}
        return event
