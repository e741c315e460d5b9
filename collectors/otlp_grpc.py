"""OTLP over gRPC: the three Export calls, answered after the commit. Does not decode (intake.py).

Codes: INVALID_ARGUMENT malformed, UNAUTHENTICATED no token, RESOURCE_EXHAUSTED too large, UNAVAILABLE with RetryInfo
when the queue is full or the store cannot be written; everything else is OK, after the commit. gRPC decompresses by
itself, and its size limit holds for what comes out.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from concurrent import futures

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from collectors.intake import Intake
from collectors.monitor import Monitor
from collectors.payload import MAX_BODY_BYTES, PROTOBUF, PayloadError
from collectors.writer import BatchRefused, Overloaded, StoreFailed
from rlinsight.errors import CollectorError
from rlinsight.wire import PRODUCER_HEADER, SEQ_HEADER, Signal

_SERVICES: dict[Signal, str] = {
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "logs": "opentelemetry.proto.collector.logs.v1.LogsService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
}
MAX_CALLS = 32  # in flight; each waits for its commit in a thread, and the messages of others are not read yet
RETRY_AFTER_S = 1


def serve(intake: Intake, monitor: Monitor, host: str, port: int, token: str | None) -> tuple[grpc.Server, int]:
    """Start the server; ``token`` None lets everyone in. Returns it and its port. Raises CollectorError when taken."""
    options = [
        ("grpc.so_reuseport", 0),  # else a second server silently shares the port
        ("grpc.max_receive_message_length", MAX_BODY_BYTES),  # holds after decompression
    ]
    server = grpc.server(futures.ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="grpc"), options=options)
    for signal, service in _SERVICES.items():
        # Bytes in and out: the batch id of a foreign sender is a hash of what it sent.
        method = grpc.unary_unary_rpc_method_handler(_export(intake, monitor, signal, token))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        # Tried with a plain socket first: gRPC prints a page of its own when it cannot bind.
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        bound = server.add_insecure_port(address)
    except (OSError, OverflowError, RuntimeError) as error:
        raise CollectorError(f"gRPC address {address}: {error}; choose another --grpc-port or --listen") from None
    server.start()
    return server, bound


def _export(
    intake: Intake, monitor: Monitor, signal: Signal, token: str | None
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        code, message = grpc.StatusCode.OK, ""
        try:
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            given = metadata.get("authorization", "").encode()
            if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                raise _Denied("send the token: authorization: Bearer <token>")
            intake.check_room()
            accepted = intake.take(signal, body, PROTOBUF, metadata.get(PRODUCER_HEADER), metadata.get(SEQ_HEADER))
            accepted.done.result()
            return accepted.response().SerializeToString()
        except _Denied as error:
            code, message = grpc.StatusCode.UNAUTHENTICATED, str(error)
        except (PayloadError, BatchRefused) as error:
            code, message = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except (Overloaded, StoreFailed) as error:
            code, message = grpc.StatusCode.UNAVAILABLE, str(error)
            if isinstance(error, StoreFailed):
                monitor.write_failed()
            context.set_trailing_metadata(_retry_info(message))
        except Exception:  # a bug: counted, then gRPC's to answer and log
            code = grpc.StatusCode.INTERNAL
            raise
        finally:
            monitor.answered("grpc", signal, code.name)
        context.abort(code, message)

    return export


class _Denied(Exception):
    """The call came without the token."""


def _retry_info(message: str) -> tuple[tuple[str, bytes], ...]:
    """When to come back: as OTLP asks, and under the key that OpenTelemetry's Python exporter reads."""
    info = RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S))
    status = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=message)
    status.details.add().Pack(info)
    return (
        ("grpc-status-details-bin", status.SerializeToString()),
        ("google.rpc.retryinfo-bin", info.SerializeToString()),
    )
