"""Promise 7. Malformed, oversized (16 MiB), wrongly typed, zip-bomb payloads: 400/413/415, the rest of the stream
unharmed; fuzzed.

Every hostile request stands between two good ones, over a connection that all three share, and in the end each good one
is stored exactly once. The same without processes, and one case per status: tests/collectors/test_writer.py and
test_process.py.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from collectors.limits import MAX_SHARED_BYTES
from collectors.payload import MAX_BODY_BYTES, MAX_MEMBERS
from rlinsight.store import query
from rlinsight.wire import SPOOL_TYPE, Batch, Signal, record
from tests.collectors.live import Collector, collector
from tests.promises.support import log_request
from tests.synthetic import Run, requests

JSON, PROTOBUF = "application/json", "application/x-protobuf"
SAMPLES = list(requests(Run(steps=1, groups=1, group_size=2)))
PAYLOADS = [(request.signal, request.message.SerializeToString()) for request in SAMPLES]
TREES = [(request.signal, json_format.MessageToDict(request.message)) for request in SAMPLES]
SERVICES = {"traces": "trace.v1.TraceService", "logs": "logs.v1.LogsService", "metrics": "metrics.v1.MetricsService"}
FUZZING = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

pytestmark = pytest.mark.slow


class Stream:
    """Good requests, numbered, and hostile ones in between."""

    def __init__(self, running: Collector) -> None:
        self.collector, self.sent = running, 0
        self.channel = grpc.insecure_channel(running.endpoint.grpc)

    def good(self) -> None:
        headers = {"content-type": PROTOBUF}
        body = log_request([self.sent], event="good")
        assert self.collector.http.post("/v1/logs", content=body, headers=headers).status_code == 200
        self.sent += 1

    def hostile(self, signal: str, body: bytes, content_type: str = PROTOBUF, **headers: str) -> int:
        """Status of a hostile request between two good ones."""
        return self.answer(signal, body, content_type, **headers).status_code

    def answer(self, signal: str, body: bytes, content_type: str, **headers: str) -> httpx.Response:
        """What a hostile request between two good ones is told."""
        self.good()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = self.collector.http.post(f"/v1/{signal}", content=body, headers={"content-type": content_type, **named})
        if reply.status_code != 200:
            assert reply.headers["content-type"] == (PROTOBUF if content_type == PROTOBUF else "application/json")
            told = Status.FromString if content_type == PROTOBUF else lambda text: json_format.Parse(text, Status())
            assert told(reply.content).message
        self.good()
        return reply

    def call(self, signal: str, body: bytes, compression: grpc.Compression | None = None) -> grpc.StatusCode:
        """Code of a hostile gRPC call between two good ones."""
        self._good_call()
        try:
            self._export(signal)(body, compression=compression)
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined]
        else:
            code = grpc.StatusCode.OK
        self._good_call()
        return code

    def _good_call(self) -> None:
        self._export("logs")(log_request([self.sent], event="good"))
        self.sent += 1

    def _export(self, signal: str) -> Any:
        return self.channel.unary_unary(f"/opentelemetry.proto.collector.{SERVICES[signal]}/Export")

    def check(self) -> None:
        """Each good one is stored exactly once."""
        rows = query(
            "SELECT (log_attributes ->> 'index')::INT AS i FROM otel_logs WHERE event_name = 'good' ORDER BY i",
            store=Path(self.collector.endpoint.store),
        )
        assert rows["i"].to_pylist() == list(range(self.sent))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stream]:
    with collector(tmp_path_factory.mktemp("hostile") / "s.duckdb") as running:
        yield (stream := Stream(running))
        assert running.stop() == 0
        stream.channel.close()


@pytest.fixture
def stream(one: Stream) -> Iterator[Stream]:
    yield one
    one.check()


@st.composite
def mutants(draw: st.DrawFn) -> tuple[Signal, bytes]:
    """A real request with some bytes replaced, cut off or repeated."""
    signal, payload = draw(st.sampled_from(PAYLOADS))
    mutant = bytearray(payload)
    pieces = st.tuples(st.integers(0, len(payload)), st.integers(0, 9), st.binary(max_size=9))
    for position, length, piece in draw(st.lists(pieces, min_size=1, max_size=8)):
        mutant[position : position + length] = piece
    return signal, bytes(mutant[: draw(st.integers(0, len(mutant)))] if draw(st.booleans()) else mutant)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["1e400", "-1", "18446744073709551616", "NaN", "\\ud800", "00" * 16, "0" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def wrong_json(draw: st.DrawFn) -> tuple[str, bytes]:
    """A real request in OTLP's JSON with some values replaced by others, and maybe a key given twice."""
    signal, tree = draw(st.sampled_from(TREES))
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        node: Any = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], (dict, list)) and draw(st.integers(0, 9)):
                node = node[key]
                continue
            node[key] = draw(VALUES)
            break
    text = json.dumps(tree)
    if draw(st.booleans()):
        text = '{"resourceSpans": 1, "resourceLogs": [], ' + text[1:]
    return signal, text.encode("utf-8", "surrogatepass")


@FUZZING
@given(mutants())
def test_mutated_protobuf(stream: Stream, mutant: tuple[str, bytes]) -> None:
    """Any bytes as protobuf are malformed, or they are a request and stored."""
    assert stream.hostile(*mutant) in (200, 400, 413)
    assert stream.call(*mutant) in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


@st.composite
def spools(draw: st.DrawFn) -> bytes:
    """Whole records around hostile payloads and numbers; in half of them some bytes are then replaced or cut off."""
    records = draw(st.lists(st.tuples(mutants(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), max_size=5))
    body = bytearray(b"".join(record(Batch(signal, items, data), seq) for (signal, data), seq, items in records))
    if draw(st.booleans()):
        position = draw(st.integers(0, len(body)))
        body[position : position + draw(st.integers(0, 30))] = draw(st.binary(max_size=30))
    return bytes(body)


@FUZZING
@given(spools())
def test_damaged_spools(stream: Stream, body: bytes) -> None:
    """Whatever a record holds, it is stored or refused by itself; a body that is no row of records is refused whole."""
    reply = stream.answer("spool", body, SPOOL_TYPE, x_rlinsight_producer="fuzzer")
    assert reply.status_code in (200, 400)
    if reply.status_code == 200:
        assert {status for _, status, *_ in reply.json()} <= {200, 400, 413}


@FUZZING
@given(wrong_json())
def test_wrongly_typed_json(stream: Stream, wrong: tuple[str, bytes]) -> None:
    """Values of another type or range, surrogates, infinities and keys given twice are malformed, or stored."""
    assert stream.hostile(*wrong, content_type=JSON) in (200, 400)


@FUZZING
@given(
    st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "identity", "br", "gzip, gzip", "x" * 99]), st.data()
)
def test_damaged_compression(stream: Stream, noise: bytes, encoding: str, data: st.DataObject) -> None:
    """Bodies that are not what their encoding says, cut short, or followed by something else."""
    signal, payload = data.draw(st.sampled_from(PAYLOADS))
    packed = gzip.compress(payload, mtime=0)
    body = data.draw(st.sampled_from([noise, packed[: len(noise)], packed + noise, zlib.compress(payload) + noise]))
    assert stream.hostile(signal, body, content_encoding=encoding) in (200, 400, 415)


NAMES = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=60).map(
    lambda text: text.strip().encode("latin-1")
)
NUMBERS = st.text("0123456789-+ e.²", max_size=40).map(lambda text: text.strip().encode("latin-1"))


@settings(FUZZING, max_examples=20)
@given(NAMES, NUMBERS)
def test_strange_headers(stream: Stream, name: Any, number: Any) -> None:
    """Producers, numbers and content types of any text: never more than a refusal."""
    assert stream.hostile("logs", b"", x_rlinsight_producer=name, x_rlinsight_seq=number) in (200, 400)
    assert stream.hostile("logs", b"", content_type=name) in (200, 400, 415)


def nested(depth: int) -> bytes:
    """A log record whose body is an array in an array ..., made by hand: protobuf builds no deep ones."""
    value = AnyValue(int_value=1).SerializeToString()
    for number in [1] * depth + [5, 2, 2, 1]:  # values, then body, log_records, scope_logs, resource_logs
        value = _field(number, value)
        if number == 1 and depth > 0:
            value = _field(5, value)  # array_value
            depth -= 1
    return value


def _field(number: int, content: bytes) -> bytes:
    size, length = b"", len(content)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def crowd(spans: int, resource_bytes: int) -> bytes:
    """Many small spans that share one large resource."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.append(KeyValue(key="k", value=AnyValue(string_value="x" * resource_bytes)))
    scope = group.scope_spans.add()
    for _ in range(spans):
        scope.spans.add(trace_id=os.urandom(16), span_id=os.urandom(8), start_time_unix_nano=1, end_time_unix_nano=2)
    return request.SerializeToString()


BOMB = gzip.compress(b"\0" * (MAX_BODY_BYTES + 1))
HOSTILE = {
    "a body over the limit": (413, "logs", b"x" * (MAX_BODY_BYTES + 1), {}),
    "a zip bomb": (413, "logs", BOMB, {"content_encoding": "gzip"}),
    "a zip bomb in pieces": (413, "logs", gzip.compress(b"\0" * 2**20) * 17, {"content_encoding": "gzip"}),
    "gzip members without end": (400, "logs", gzip.compress(b"") * (MAX_MEMBERS + 1), {"content_encoding": "gzip"}),
    "a crowd under a large resource": (413, "traces", crowd(3000, MAX_SHARED_BYTES // 2000), {}),
    "deep JSON": (400, "logs", b'{"resourceLogs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {"content_type": JSON}),
    "deep objects": (400, "logs", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, {"content_type": JSON}),
    "JSON that is a number": (400, "logs", b"1" * 5000, {"content_type": JSON}),
    "UTF-16": (400, "logs", '{"resourceLogs": 1}'.encode("utf-16"), {"content_type": JSON}),
    "a number too long": (400, "logs", b"", {"x_rlinsight_producer": "p", "x_rlinsight_seq": "9" * 5000}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_each_kind_of_bomb_has_its_status(stream: Stream, kind: str) -> None:
    """Too large, too deep, too many: refused before it costs memory or time."""
    status, signal, body, settings_ = HOSTILE[kind]
    assert stream.hostile(signal, body, **settings_) == status


def test_deep_protobuf_is_refused_or_stored(stream: Stream) -> None:
    """Values nested beyond protobuf's limit are malformed over both transports; those within it are stored."""
    assert [stream.hostile("logs", nested(depth)) for depth in (0, 1, 20, 1000)] == [200, 200, 200, 400]
    assert stream.call("logs", nested(1000)) == grpc.StatusCode.INVALID_ARGUMENT


def test_grpc_bombs_have_their_code(stream: Stream) -> None:
    """Over the limit before or after decompression is RESOURCE_EXHAUSTED; so is nothing else."""
    too_large = b"\0" * (MAX_BODY_BYTES + 1)
    assert stream.call("logs", too_large) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stream.call("logs", too_large, grpc.Compression.Gzip) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stream.call("traces", crowd(3000, MAX_SHARED_BYTES // 2000)) == grpc.StatusCode.INVALID_ARGUMENT
    assert stream.call("logs", log_request([1], event="packed"), grpc.Compression.Gzip) == grpc.StatusCode.OK


@pytest.mark.parametrize("records", [1, 1000])
def test_text_that_swells_is_refused_once_and_for_all(stream: Stream, records: int) -> None:
    """Control characters take six bytes each in JSON: too much for the store is 413, not 503 at each retry."""
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    text = KeyValue(key="k", value=AnyValue(string_value="\1" * (15 * 2**20 // records)))
    for _ in range(records):
        scope.log_records.add(time_unix_nano=1, attributes=[text])
    assert stream.hostile("logs", request.SerializeToString()) == 413


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_noise_on_a_port_harms_no_other_connection(stream: Stream, port: str) -> None:
    """Random bytes, a request that stops in the middle of its body, and connections that say nothing."""
    address = getattr(stream.collector.endpoint, port).removeprefix("http://")
    host, _, number = address.rpartition(":")
    half = (
        b"POST /v1/logs HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: 99\r\n\r\nhalf"
    )
    silent = socket.create_connection((host, int(number)))
    for noise in (os.urandom(5000), half, b"GET /" + b"a" * 100_000, b"\0" * 100):
        with socket.create_connection((host, int(number))) as sock:
            sock.sendall(noise)
        stream.good()
        stream._good_call()
    silent.close()
