"""`rlinsight check-model` as people run it: real processes, a real collector, its rows in a store that has no run."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from core_trainer.checks import Report, Spec
from rlinsight import check_model, store
from tests.e2e.test_launch import heed_signals

COMMAND = Path(sys.executable).parent / "rlinsight"
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def check(folder: Path, model: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command in a folder of its own, on few prompts."""
    small = ["--prompts", "4", "--new-tokens", "4", "--concurrency", "2,8", "--dtype", "float32"]
    return subprocess.run(
        [COMMAND, "check-model", str(model), "--store", str(folder / "s.duckdb"), *small, *options],
        cwd=folder, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def rows(folder: Path, sql: str) -> list[dict[str, Any]]:
    return store.query(sql, store=folder / "s.duckdb").to_pylist()


@pytest.mark.skipif(HAS_VLLM, reason="asks what is said where vLLM is missing; tests/e2e/test_vllm.py has it")
def test_a_good_model_passes_and_is_recorded(tmp_path: Path, tiny_model: Path) -> None:
    """Exit 0 and a verdict; training and native have every number; an engine that is not there is said to be not."""
    done = check(tmp_path, tiny_model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "OK: training, native agree with transformers; vllm not checked: not installed"
    )
    assert "vllm: vLLM is not installed here; run: make vllm" in done.stdout
    assert "LlamaForCausalLM" in done.stdout
    training, native, vllm = rows(tmp_path, "SELECT * FROM model_checks ORDER BY time_ns")
    assert [row["part"] for row in (training, native, vllm)] == ["training", "native", "vllm"]
    assert [row["status"] for row in (training, native, vllm)] == ["ok", "ok", "not installed"]
    assert len({row["check_id"] for row in (training, native, vllm)}) == 1
    assert training["check_id"] in done.stderr
    for row in (training, native):
        assert (row["model"], row["dtype"], row["num_prompts"]) == (str(tiny_model), "float32", 4)
        assert row["architecture"] == "LlamaForCausalLM"
        assert 0 <= row["mean_log_prob_gap"] <= row["max_log_prob_gap"] < 1e-4
        assert row["code_version"].startswith("0.1.0")
        assert '"cores"' in row["host"]
    assert (native["parity"], native["divergent_prompt"]) == (1.0, None)
    assert vllm["parity"] is None
    ladder = rows(tmp_path, "SELECT * FROM model_check_latency ORDER BY concurrency")
    assert [(row["concurrency"], row["num_requests"]) for row in ladder] == [(2, 8), (8, 32)]
    for row in ladder:
        assert row["check_id"] == native["check_id"]
        assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"] < 60
        assert 0 < row["inter_token_p50_s"] <= row["inter_token_p99_s"] < 60
        assert row["tokens_per_s"] > 0
    # one OTLP event a row, of no run: nothing looks like a run, and the producer's batches are all there
    events = rows(tmp_path, "SELECT event_name, run_id FROM otel_logs WHERE event_name LIKE 'rlinsight.model_check%'")
    assert len(events) == 5
    assert {event["run_id"] for event in events} == {None}
    assert rows(tmp_path, "SELECT * FROM runs") == []
    assert rows(tmp_path, "SELECT sum(missing) AS n FROM health")[0]["n"] == 0
    assert store.read_endpoint(tmp_path / "s.duckdb") is None


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    """No such model, engine or number: refused by name, with what to give instead."""
    for options, code, message in (
        ([tmp_path / "none"], 1, "does not exist; give a safetensors directory"),
        ([tiny_model, "--engines", "native,vlm"], 2, "--engines vlm is not known; give some of native, vllm"),
        ([tiny_model, "--concurrency", "1,x"], 2, "--concurrency 1,x is not a list of numbers"),
        ([tiny_model, "--dtype", "fp8"], 2, "--dtype fp8 is not known"),
    ):
        done = check(tmp_path, options[0], *options[1:])
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; run: make test-vllm")
def test_both_engines_pass(tmp_path: Path) -> None:
    """vLLM writes transformers' greedy tokens, has the trainer's log-probs, and streams."""
    from tests.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "model", hidden_size=128)  # vLLM's CPU attention wants heads of 32 or more
    done = check(tmp_path, model, "--engines", "native,vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "OK: training, native, vllm agree with transformers"
    (vllm,) = rows(tmp_path, "SELECT * FROM model_checks WHERE part = 'vllm'")
    assert (vllm["parity"], vllm["status"]) == (1.0, "ok")
    assert vllm["max_log_prob_gap"] < 1e-4
    ladder = rows(tmp_path, "SELECT part, concurrency FROM model_check_latency ORDER BY ALL")
    assert [tuple(row.values()) for row in ladder] == [("native", 2), ("native", 8), ("vllm", 2), ("vllm", 8)]


@pytest.mark.parametrize(("asked", "passed"), [([], True), (["native"], True), (["native", "vllm"], False)])
def test_an_engine_that_was_asked_for_must_be_there(asked: list[str], passed: bool) -> None:
    """What is not installed fails the check of whoever named it, and no other."""
    native, vllm = Report("native", "ok", parity=1.0), Report("vllm", "not installed", "run: make vllm")
    reports = [Report("training", "ok"), native, vllm]
    check = check_model.Check("c", "m", reports, frozenset(asked))
    assert check.passed == passed
    words = "OK" if passed else "NOT OK"
    told = f"{words}: training, native agree with transformers; vllm not checked: not installed"
    assert check_model.render(check)[-1] == told


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, tiny_model: Path) -> None:
    """Each part is failed by name, nothing waits for it, and no process is left."""
    done = check(tmp_path, tiny_model, "--engines", "native", "--timeout", "1")
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("not done after 1 s; give it more with --timeout") == 2
    assert done.stdout.splitlines()[-1] == "NOT OK: not training (failed), native (failed)"
    left = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert left == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process(tmp_path: Path, tiny_model: Path, number: signal.Signals) -> None:
    """Ctrl-C, a supervisor's stop, a terminal that is closed: part and collector end with the command."""
    process = subprocess.Popen(
        [COMMAND, "check-model", str(tiny_model), "--store", str(tmp_path / "s.duckdb")],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (children := [p for p in psutil.Process(process.pid).children() if "check_model" in str(p.cmdline())]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, number)  # to the command alone: its children are its own to end
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    deadline = time.monotonic() + 10  # a killed process of this size takes a moment to go
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
    assert store.read_endpoint(tmp_path / "s.duckdb") is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "its process was killed by SIGILL"),
        ("raise SystemExit('no such instruction')", r"its process ended with exit code 1 \(no such instruction\)"),
        ("print('{\"stage\": \"one\"}'); print('{\"rep', end='')", "its process ended with exit code 0"),
    ],
)
def test_a_part_that_dies_takes_no_other_along(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in a library is that part's failure, with the signal or the last words."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$SCRIPT"\n')
    python.chmod(0o755)
    monkeypatch.setenv("SCRIPT", script)
    monkeypatch.setattr(check_model.sys, "executable", str(python))
    report, reference = check_model._part(Spec("m", "auto", 1, 2, [1], "vllm"), 60.0, lambda _: None)
    assert (report.part, report.status, reference) == ("vllm", "failed", None)
    assert re.fullmatch(reason, str(report.reason))


def test_the_verdict_is_the_last_line() -> None:
    """Every part is in it, with how it stands."""
    reports = [Report("training", "ok"), Report("native", "mismatch", "a log-prob is 2 off"), Report("vllm", "refused")]
    lines = check_model.render(check_model.Check("c", "m", reports, frozenset()))
    assert lines[-1] == "NOT OK: training agree with transformers; not native (mismatch), vllm (refused)"
    assert "native: a log-prob is 2 off" in lines


def test_the_verdict_says_what_an_engine_was_compared_with() -> None:
    """Without transformers' answers it was training alone."""
    reports = [Report("training", "failed", "no memory"), Report("native", "ok", max_log_prob_gap=1e-6)]
    check = check_model.Check("c", "m", reports, frozenset())
    assert check_model.render(check)[-1] == "NOT OK: native agree with training alone; not training (failed)"
