"""A run starts its parts in order and stops all of them on every path: success, errors, signals, kill -9.

The trainer is a double passed in (tests/e2e/fake_trainer.py); collector, store, spool and processes are real.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from rlinsight import store
from tests.e2e.fake_trainer import may_end

ROOT = Path(__file__).parents[2]


def heed_signals() -> None:
    """In a child before it starts: signals that nohup or a background job made the test run ignore count again."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def assert_linked(path: Path) -> None:
    """Every finished run of a store has joins, and each of them is whole."""
    edges = store.query(
        "SELECT run_id, edge, n, linked FROM runs LEFT JOIN v_linkage USING (run_id) WHERE status = 'finished'",
        store=path,
    ).to_pylist()
    assert edges
    assert [edge for edge in edges if edge["n"] is None or edge["linked"] != edge["n"]] == []


WORKER = """
import select, sys, time
from functools import partial
from pathlib import Path
from rlinsight import store, telemetry
path = Path(sys.argv[1])
address, token = store.locate(path)
telemetry.setup("worker", spool_dir=Path(sys.argv[2]), run_id="another", attempt=1, endpoint=address, token=token,
    locate=partial(store.locate, path))
beats = 0
while not select.select([sys.stdin], [], [], 0.05)[0]:
    telemetry.event("beat", {"i": beats})
    beats += 1
assert telemetry.shutdown(20)
print(beats)
"""


class Place:
    """A folder with a config, a store and the runs trained into it."""

    def __init__(self, path: Path) -> None:
        self.path, self.store = path, path / "runs" / "s.duckdb"
        data = path / "data.jsonl"
        data.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        self.config = path / "c.yaml"
        self.write(total_steps=3)

    def write(self, **trainer: Any) -> None:
        tree = {
            "run": {"name": "r", "dir": str(self.path / "runs")},
            "model": {"source": "some-owner/some-model"},
            "data": {"train": str(self.path / "data.jsonl")},
            "reward": {"functions": [{"type": "numeric"}]},
            "trainer": trainer,
            "telemetry": {"store": str(self.store)},
        }
        self.config.write_text(yaml.safe_dump(tree))

    def start(self, mode: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.e2e.fake_trainer", str(self.config), mode, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals
        )

    def let_go(self, process: subprocess.Popen[str]) -> None:
        """Let a ``held`` run end."""
        may_end(self.store, process.pid).touch()

    def start_worker(self) -> subprocess.Popen[str]:
        """A process of its own that emits until it reads a line, then tells how much."""
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, str(self.store), str(self.path / "worker-spool")],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, mode: str, *arguments: str) -> tuple[int, str, str]:
        process = self.start(mode, *arguments)
        out, err = process.communicate(timeout=200)
        if process.returncode == 0 and self.store.exists():
            assert_linked(self.store)
        return process.returncode, out, err

    def query(self, sql: str) -> list[dict[str, Any]]:
        return store.query(sql, store=self.store).to_pylist()

    def processes(self) -> list[psutil.Process]:
        """Living processes that name this folder, this test's own excepted."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            command = " ".join(process.info["cmdline"] or [])
            if str(self.path) in command and process.pid != os.getpid() and process.info["status"] != "zombie":
                found.append(process)
        return found

    def wait_for(self, condition: Any, timeout_s: float = 120) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.1)
        return value


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    left = place.processes()
    for process in left:
        process.kill()
    assert left == [], "processes were left behind"


def test_a_run_leaves_a_whole_record_and_no_process(place: Place) -> None:
    """Exit 0, the summary with the next commands, which work, every step in the store, run.end, no endpoint."""
    code, out, err = place.run("finish")
    assert (code, err) == (0, "")
    assert place.processes() == []
    assert "first step 0.333 -> last step 1.000" in out
    assert "of records link up" in out
    assert f"rlinsight dashboard --store {place.store}" in out
    [run] = place.query("select * from runs")
    assert (run["name"], run["status"], run["steps_done"], run["total_steps"], run["exit_code"]) == (
        "r",
        "finished",
        3,
        3,
        0,
    )
    assert run["config_hash"]
    assert run["code_version"].startswith("0.1.0")
    assert store.read_endpoint(place.store) is None
    [query] = re.findall(r'rlinsight sql .*"(select .*)"', out)
    assert len(place.query(query)) == 3


def test_an_error_is_one_line_and_stored(place: Place) -> None:
    """The exit code and the reason reach the terminal and the store alike."""
    code, _, err = place.run("fail")
    assert code == 1
    assert err == "error: reward numeric timed out; raise its timeout_s\n"
    [run] = place.query("select status, exit_code, reason from runs")
    assert run == {
        "status": "failed",
        "exit_code": 1,
        "reason": "RewardError: reward numeric timed out; raise its timeout_s",
    }


def test_a_bug_keeps_its_traceback_and_still_ends_the_run(place: Place) -> None:
    """An unexpected error is not hidden, and the store says that the run failed."""
    code, _, err = place.run("bug")
    assert code == 1
    assert "Traceback" in err
    assert "ZeroDivisionError" in err
    assert place.query("select status, reason from runs") == [
        {"status": "failed", "reason": "ZeroDivisionError: a bug"}
    ]


def test_ctrl_c_finishes_the_step_and_resume_goes_on(place: Place) -> None:
    """The step in hand is finished and checkpointed; --resume trains the rest as attempt 2 of the same run."""
    run = interrupted(place, signal.SIGINT)
    assert place.run("finish", "--resume")[0] == 0
    [resumed] = place.query("select run_id, status, steps_done, attempts from runs")
    assert resumed == {"run_id": run["run_id"], "status": "finished", "steps_done": 400, "attempts": 2}
    assert place.query("select resumed_from_step as n from run_starts where attempt = 2") == [{"n": run["steps_done"]}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_are_as_gentle_as_ctrl_c(place: Place, number: signal.Signals) -> None:
    """A scheduler that ends the job, and a terminal that is closed, get a checkpoint too."""
    interrupted(place, number)


def test_a_failed_run_says_how_to_go_on(place: Place) -> None:
    """When a failure leaves a checkpoint the command that resumes from it is printed, and the error stays as it is."""
    code, out, err = place.run("crash")
    assert (code, err) == (1, "error: the actor ran out of memory; lower trainer.micro_batch_tokens\n")
    [command] = re.findall(r"to go on after step-1: rlinsight (train .*)", out)
    config = shlex.split(command)[1]
    assert Path(config).is_file()
    assert place.run("finish", "--resume")[0] == 0
    assert place.query("select attempts, status from runs") == [{"attempts": 2, "status": "finished"}]


def test_a_library_that_turns_sigterm_into_an_exit_makes_no_failure(place: Place) -> None:
    """Ray takes SIGTERM while it starts and raises SystemExit; that is a stop like any other, with its exit code."""
    code, out, _ = place.run("exit")
    assert code == 128 + signal.SIGTERM
    assert "interrupted at step 1/3" in out
    assert place.query("select status, reason from runs") == [{"status": "interrupted", "reason": "stopped by SIGTERM"}]


def interrupted(place: Place, number: signal.Signals) -> dict[str, Any]:
    """Stop a run after its first step with one signal, check how it ends, and return its row."""
    place.write(total_steps=400)  # two minutes: a step shows in the store up to 2.5 s after it ended
    process = place.start("slow")
    place.wait_for(lambda: place.store.exists() and _steps(place))
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert "stopping with a checkpoint" in err
    assert "--resume r-" in out
    [run] = place.query("select run_id, status, steps_done, reason from runs")
    assert (run["status"], run["reason"]) == ("interrupted", f"stopped by {number.name}")
    return run


def test_two_signals_stop_now(place: Place) -> None:
    """A trainer that does not come back is unwound by the second signal; the record still ends in order."""
    process = place.start("stuck")
    place.wait_for(lambda: place.store.exists() and place.query("select 1 from span_starts"))
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "interrupted at step 0/3" in out
    assert place.query("select status, exit_code from runs") == [{"status": "interrupted", "exit_code": 130}]


def test_a_killed_run_leaves_no_collector_and_its_spool_is_delivered_later(place: Place) -> None:
    """After kill -9 the collector goes by itself; the next run into the store brings what was left on disk."""
    process = place.start("die")
    process.wait(timeout=120)
    assert process.returncode == -signal.SIGKILL
    place.wait_for(lambda: not place.processes())
    assert place.run("finish")[0] == 0
    assert place.query("select steps_done from runs order by started") == [{"steps_done": 1}, {"steps_done": 3}]
    assert place.query("select step from step_metrics where name = 'after/the/collector'") == [{"step": 2}]


def test_a_folder_of_an_earlier_run_that_cannot_be_delivered_stops_nothing(place: Place) -> None:
    """One warning line per run whose spool another user owns or is damaged; this run trains and is delivered."""
    assert place.run("finish")[0] == 0
    [first] = place.store.parent.glob("r-*")
    (first / "spool" / "policy-0-dead" / "lock").mkdir(parents=True)  # cannot be opened, for root neither
    code, out, err = place.run("finish")
    assert code == 0, err
    assert out.count("warning: ") == 1
    assert "copy it to a writable directory" in out
    assert place.query("select status from runs") == [{"status": "finished"}] * 2


def test_a_spool_that_cannot_be_delivered_at_the_end_fails_no_run(place: Place) -> None:
    """A run that has trained exits 0 and prints the command that delivers later."""
    code, out, err = place.run("spoil")
    assert code == 0, err
    assert "rlinsight ingest" in out


def test_a_collector_that_dies_is_replaced_while_the_run_goes_on(place: Place) -> None:
    """Twice; the senders of the run and of another process follow, all is stored once, and every edge links."""
    place.write(total_steps=20)
    process = place.start("held")
    first = place.wait_for(lambda: store.read_endpoint(place.store))
    worker = place.start_worker()
    seen = [first.pid]
    for _ in range(2):
        place.wait_for(lambda: _steps(place) and place.query("select 1 from otel_logs where event_name = 'beat'"))
        os.kill(seen[-1], signal.SIGKILL)
        place.wait_for(lambda: (now := store.read_endpoint(place.store)) and now.pid != seen[-1])
        seen.append(store.read_endpoint(place.store).pid)  # type: ignore[union-attr]
    known = len(place.query("select 1 from otel_logs where event_name = 'beat'"))
    place.wait_for(lambda: len(place.query("select 1 from otel_logs where event_name = 'beat'")) > known)
    place.let_go(process)
    sent = int(worker.communicate("stop\n", timeout=200)[0].split()[-1])
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0
    assert "left on disk" not in out
    assert f"collector {seen[0]} is gone, {seen[1]} took over" in err
    assert place.query("select status, steps_done from runs where name = 'r'") == [
        {"status": "finished", "steps_done": 20}
    ]
    assert place.query("select count(*) as n, count(distinct step) as steps from steps") == [{"n": 20, "steps": 20}]
    assert place.query("select count(*) as n from otel_logs where event_name = 'beat'") == [{"n": sent}]
    assert place.query("select edge from v_linkage where linked <> n") == []
    assert place.query("select sum(missing) as missing, sum(dropped) as dropped from health") == [
        {"missing": 0, "dropped": 0}
    ]
    assert place.processes() == []
    log = place.store.with_name(f"{place.store.name}.collector.log")
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().count("collecting into") == 3


def test_a_store_that_dies_with_its_collector_still_lets_the_run_finish(place: Place) -> None:
    """When no collector can start again the run exits 0 and prints the command that delivers later, which works."""
    place.write(total_steps=10)
    process = place.start("held")
    place.wait_for(lambda: place.store.exists() and _steps(place))
    endpoint = store.read_endpoint(place.store)
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGKILL)
    kept = place.store.rename(place.store.with_name("kept"))
    place.store.mkdir()
    place.let_go(process)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    [command] = re.findall(r"with: rlinsight (ingest .*)", out)
    place.store.rmdir()
    kept.rename(place.store)
    subprocess.run([Path(sys.executable).with_name("rlinsight"), *shlex.split(command)], check=True, timeout=200)
    assert place.query("select count(*) as n from steps") == [{"n": 10}]
    assert_linked(place.store)


def test_two_runs_share_one_collector(place: Place) -> None:
    """A second run becomes an owner of the collector that runs; the first gives up its share and leaves without it."""
    place.write(total_steps=5)
    first = place.start("held")
    endpoint = place.wait_for(lambda: store.read_endpoint(place.store))
    second = place.start("held")
    place.wait_for(lambda: _owners(endpoint) == sorted([first.pid, second.pid]))
    place.let_go(first)
    assert first.wait(timeout=120) == 0
    assert _owners(endpoint) == [second.pid]
    place.let_go(second)
    assert second.wait(timeout=120) == 0
    assert place.query("select count(*) as n from runs where status = 'finished' and steps_done = 5") == [{"n": 2}]
    assert_linked(place.store)


JOIN = """
import os, sys
from pathlib import Path
from rlinsight import collecting
print("ready", flush=True)
input()
with collecting.collector(Path(sys.argv[1])) as endpoint:
    print(endpoint.pid, flush=True)
    input()
"""


def test_runs_that_start_at_the_same_moment_share_one_collector(place: Place) -> None:
    """Three processes that look for a collector at once all get the same one, which is gone with the last of them."""
    command = [sys.executable, "-c", JOIN, str(place.store)]
    started = [
        subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for go in ("ready", "joined"):
        lines = [process.stdout.readline().strip() for process in started if process.stdout]
        assert len(set(lines)) == 1, lines
        assert lines[0] == go or (go == "joined" and lines[0].isdigit())
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert place.processes() == []
    assert store.read_endpoint(place.store) is None


def test_a_collector_started_by_hand_outlives_the_runs_that_join_it(place: Place) -> None:
    """`rlinsight collect` serves until it is stopped, and then ends with exit code 0."""
    script = Path(sys.executable).with_name("rlinsight")
    command = [script, "collect", "--store", place.store, "--http-port", "0", "--grpc-port", "0"]
    collector = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    endpoint = place.wait_for(lambda: store.read_endpoint(place.store))
    assert place.run("finish")[0] == 0
    assert _owners(endpoint) == [collector.pid]
    collector.send_signal(signal.SIGTERM)
    assert collector.wait(timeout=120) == 0
    assert place.query("select status from runs") == [{"status": "finished"}]


def _owners(endpoint: store.Endpoint) -> list[int]:
    return httpx.get(f"{endpoint.http}/healthz").json()["owners"]


def test_a_store_that_cannot_be_written_stops_the_run_before_it_starts(place: Place) -> None:
    """One line with the reason; no run folder is made."""
    place.store.parent.mkdir()
    place.store.mkdir()
    code, _, err = place.run("finish")
    assert code == 1
    assert err.startswith("error: ")
    assert str(place.store) in err
    assert err.count("\n") == 1
    assert list(place.store.parent.glob("r-*")) == []


def _steps(place: Place) -> bool:
    return bool(place.query("select 1 from steps"))
