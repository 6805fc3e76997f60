"""A save that is killed leaves the old store or the new one, whole, and the next save clears what it left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_audit.prefix.store import load, save
from prefix_models import WORLD

SCRIPT = Path(__file__).with_name("saving_child.py")


@pytest.mark.parametrize(
    ("count", "seed"),
    [(50, 1), pytest.param(500, 2, marks=pytest.mark.nightly)],
    ids=["50", "500"],
)
def test_killed_at_any_moment_the_store_is_the_old_or_the_new_one(
    tmp_path: Path, count: int, seed: int
) -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=20 * count,
    )
    assert answer.returncode == 0, answer.stderr
    found = [line.split() for line in answer.stdout.splitlines()]
    assert len(found) == count
    assert {state for state, _ in found} == {"old", "new"}, "the kills met both"
    assert any(int(litter) for _, litter in found), "some fell inside a save"
    save(tmp_path, [], WORLD)
    assert load(tmp_path, WORLD) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]
