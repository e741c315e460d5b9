"""Token arrays from a producer to the store: seconds until the last is stored, and bytes a token on disk.

    python benchmarks/tokens.py [--tokens 20_000_000] [--length 500] [--decimals 5 | --exact]

Emits what a trainer does for every rollout: a turn's token ids and rollout log-probs, then its training arrays, through
telemetry (queue, fsynced spool, sender) into a collector process. Values have the shape of a language model's: ids by a
power law over 49,152 tokens, log-probs as differences of float32 logits with half of the tokens near certain, the
trainer's own within 2e-3 of the engine's, one advantage a rollout. The texts of a run are left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from collectors.server import start_process
from rlinsight import names, telemetry
from rlinsight.store import query

POOL = 2000  # different rollouts; more are repeats under other ids, too far apart to be packed as such
FLUSH_EVERY = 400  # rollouts: the queue is bounded and drops what does not fit


def rollouts(length: int) -> list[dict[str, bytes]]:
    """Arrays of one rollout each."""
    draw = np.random.default_rng(0)

    def log_probs() -> np.ndarray:
        certain = draw.random(length) < 0.55
        chance = np.where(certain, draw.beta(60, 0.6, length), draw.beta(1.2, 1.5, length)).clip(1e-6, 1 - 1e-9)
        logit = draw.normal(18, 3, length).astype(np.float32)
        return logit - (logit - np.log(chance)).astype(np.float32)

    made = []
    for _ in range(POOL):
        rollout = log_probs()
        noise = [draw.normal(0, scale, length) * (rollout < -1e-4) for scale in (2e-3, 5e-2)]
        made.append(
            {
                names.TOKEN_IDS: np.minimum(draw.pareto(0.6, length) * 40, 49_151).astype("<i4").tobytes(),
                names.ROLLOUT_LOG_PROBS: rollout.astype("<f4").tobytes(),
                names.OLD_LOG_PROBS_ARRAY: (rollout + noise[0]).astype("<f4").tobytes(),
                names.REF_LOG_PROBS_ARRAY: (rollout + noise[1]).astype("<f4").tobytes(),
                names.ADVANTAGES_ARRAY: np.full(length, draw.normal(), "<f4").tobytes(),
            }
        )
    return made


def emit(count: int, pool: list[dict[str, bytes]]) -> None:
    """Every rollout as sampled and as trained."""
    for i in tqdm(range(count), unit="rollout"):
        arrays = pool[i % POOL]
        identity = {names.ROLLOUT_ID: f"r-{i:08d}", names.TURN_INDEX: 0, names.STEP_INDEX: i // 64 + 1}
        sampled = {key: arrays[key] for key in (names.TOKEN_IDS, names.ROLLOUT_LOG_PROBS)}
        telemetry.event(names.TURN_CONTENT, identity | sampled)
        trained = {key: value for key, value in arrays.items() if key not in sampled}
        telemetry.event(names.ROLLOUT_TRAINED, identity | trained)
        if i % FLUSH_EVERY == 0 and not telemetry.flush(120):
            raise SystemExit("the collector does not keep up")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--length", type=int, default=500, help="tokens of a rollout")
    parser.add_argument("--decimals", type=int, default=5)
    parser.add_argument("--exact", action="store_true", help="without rounding")
    arguments = parser.parse_args()
    count = arguments.tokens // arguments.length
    pool = rollouts(arguments.length)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "s.duckdb"
        endpoint = start_process(store, owner_pid=1)
        decimals = None if arguments.exact else arguments.decimals
        began = time.perf_counter()
        telemetry.setup(
            "bench", spool_dir=Path(folder) / "spool", run_id="bench", attempt=1, endpoint=endpoint.http,
            token_decimals=decimals,
        )  # fmt: skip
        emit(count, pool)
        if not telemetry.shutdown(120):
            raise SystemExit("not everything was delivered")
        seconds = time.perf_counter() - began
        sampled, trained = (
            query(f"SELECT sum(len({column})) AS n FROM {table}", store=store)["n"][0].as_py()
            for table, column in (("token_runs", "token_ids"), ("rollout_training", "old_log_probs"))
        )
        if (sampled, trained) != (count * arguments.length,) * 2:
            raise SystemExit(f"emitted {count * arguments.length} tokens, stored {sampled} and {trained}")
        process = psutil.Process(endpoint.pid)
        process.terminate()
        process.wait()
        size = store.stat().st_size
        blocks = query("SELECT used_blocks * block_size AS n FROM pragma_database_size()", store=store)
        used = blocks["n"][0].as_py()
    print(
        f"{sampled:,} tokens, ids and 4 floating arrays, {arguments.length} tokens a rollout, "
        f"{'every bit kept' if decimals is None else f'{decimals} decimals'}: stored in **{seconds:.1f} s**, "
        f"**{used / sampled:.2f} bytes** a token in use on disk, {size / sampled:.2f} with the file's free blocks."
    )


if __name__ == "__main__":
    main()
