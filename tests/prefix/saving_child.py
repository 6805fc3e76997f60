"""Forks children that save to one store without end, kills each at a random moment, and says what it finds then.

Run as a script: `saving_child.py FOLDER COUNT SEED`. This process reads files only,
never an array: MLX does not survive a fork once it has started its threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from mlx_audit.prefix.fingerprint import Fingerprint
from mlx_audit.prefix.store import load, save

WORLD = Fingerprint(weights="killed")
KEYS = {"old": [[1, 2, 3], [4, 5]], "new": [[1, 2, 3], [6, 7, 8, 9], [6]]}


def save_without_end(folder: Path, ready: int) -> NoReturn:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    from mlx_audit.prefix.snapshot import Snapshot

    def taken(key: list[int], shade: int) -> Snapshot:
        cache = KVCache()
        rows = mx.full((1, 2, len(key), 512), shade * 10 + len(key))
        cache.update_and_fetch(rows, rows)
        return Snapshot.take([cache], len(key))

    stores = [[(key, taken(key, shade)) for key in keys] for shade, keys in enumerate(KEYS.values(), start=1)]
    os.write(ready, b"r")
    while True:
        for entries in stores:
            save(folder, entries, WORLD)
        os.write(ready, b"c")


def killed(folder: Path, seconds: float) -> float:
    """Let a child save for some seconds, or for one round if they are 0; kill it; return the seconds it saved for."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        save_without_end(folder, write)
    os.close(write)
    os.read(read, 1)
    start = time.monotonic()
    if seconds:
        time.sleep(seconds)
    else:
        os.read(read, 1)
    took = time.monotonic() - start
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    return took


def main(folder: Path, count: int, seed: int) -> None:
    choice = random.Random(seed)
    one_round = killed(folder, 0)
    for _ in range(count):
        killed(folder, choice.uniform(1e-4, 1.5 * one_round))
        found = [entry.ids for entry in load(folder, WORLD, verify=True)]
        litter = len(list(folder.iterdir())) - len(found) - 2
        state = next(name for name, keys in KEYS.items() if keys == found)
        sys.stdout.write(f"{state} {litter}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
