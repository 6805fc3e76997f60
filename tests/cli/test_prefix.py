"""`mlx-audit prefix`: what a store holds, drawn as a tree; hostile stores are refused with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import mlx_audit
from mlx_audit.cli._store import _heads, _last_children, _nodes
from mlx_audit.cli.prefix import prefix
from mlx_audit.prefix import PrefixRefused
from mlx_audit.prefix.radix import RadixTree
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.store import save
from prefix_models import WORLD, bodies, prefilled, snapshot, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of four texts: two that part after a third one, and one that shares nothing."""
    entries = []
    for length, tail in ((10, []), (10, [90, 91, 92]), (10, [93]), (0, [3, 1, 4, 1, 5])):
        tokens = [*text(length), *tail]
        run = prefilled("mamba2", 1)
        run = type(run)(run.model).feed_all([tokens])
        entries.append((tokens, Snapshot.take(run.caches, len(tokens))))
    entries.append((text(30), snapshot("gemma3_text", 30)))
    place = tmp_path_factory.mktemp("store")
    save(place, entries, WORLD)
    return place


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return mlx_audit("prefix", *map(str, arguments))


def test_the_tree_is_drawn(folder: Path) -> None:
    found = run(folder)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].startswith("5 entries, ")
    assert "sizes compared; --verify reads every byte" in lines[0]
    tree = [line for line in lines if line.lstrip("│ ").startswith(("├─", "└─"))]
    assert [line.split("●")[0].rstrip() for line in tree] == [
        "├─ 3 1 4 1 5",
        "└─ 31 39 61 0 50 … 25 (10 tokens)",
        "   ├─ 62 16 81 63 59 … 30 (20 tokens)",
        "   ├─ 90 91 92",
        "   └─ 93",
    ]
    assert "30 tokens" in tree[2]
    assert tree[2].endswith("2 × rotating, 2 × linear  whole only (wrapped-ring)")
    assert tree[4].endswith("4 × arrays  whole only (recurrent-off-boundary)")
    assert any(line.split() == ["tenant", WORLD.parts["tenant"][:12]] for line in lines)
    assert any(line.startswith("  not stated: model, quantization") for line in lines)


def test_everything_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefix(folder, verify=True, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["verified"], found["nodes"]) == ("mlx-audit/prefix-inspection/1", True, 5)
    assert found["fingerprint"]["weights"] == WORLD.parts["weights"]
    assert found["fingerprint"]["salt"] is None
    assert found["file_bytes"] == sum(path.stat().st_size for path in bodies(folder))
    first, *_, last = found["entries"]
    assert first["caches"] == {"arrays": 4}
    assert first["shorter"] == {"refused": "recurrent-off-boundary", "where": "layer 0 (arrays)"}
    assert (last["tokens"], last["positions"], last["caches"]) == (30, [30], {"rotating": 2, "linear": 2})
    assert sum(entry["memory_bytes"] for entry in found["entries"]) == found["memory_bytes"]
    assert [row["entry"] for row in found["tree"]] == [4, 1, 5, 2, 3]


def _altered(place: Path) -> None:
    body = bodies(place)[0]
    body.write_bytes(body.read_bytes()[:-1] + b"\x01")


def _cut(place: Path) -> None:
    body = bodies(place)[0]
    body.write_bytes(body.read_bytes()[:-100])


def _version(place: Path) -> None:
    path = place / "manifest.json"
    path.write_text(path.read_text().replace("prefix-store/1", "prefix-store/9"))


def _control(place: Path) -> None:
    (place / "manifest.json").write_text('{"format": "\\u001b[31mred"}')


def _nested(place: Path) -> None:
    (place / "manifest.json").write_text("[" * 100_000)


def _pipe(place: Path) -> None:
    (place / "manifest.json").unlink()
    os.mkfifo(place / "manifest.json")


def _gone(place: Path) -> None:
    (place / "manifest.json").unlink()


HOSTILE = [
    (_cut, "damaged"),
    (_version, "format-version"),
    (_control, "format-version"),
    (_nested, "damaged"),
    (_pipe, "damaged"),
    (_gone, "damaged"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    save(tmp_path / "store", [(text(20), snapshot("mamba2", 20))], WORLD)
    return tmp_path / "store"


@pytest.mark.parametrize(("spoil", "reason"), HOSTILE)
def test_hostile_stores_are_refused(spoil: Callable[[Path], Any], reason: str, store: Path) -> None:
    spoil(store)
    with pytest.raises(PrefixRefused) as caught:
        prefix(store)
    assert (caught.value.reason, caught.value.exit_code) == (reason, 2)


def test_a_refusal_is_one_line_and_exit_code_2(store: Path) -> None:
    _control(store)
    found = run(store)
    assert (found.returncode, found.stdout) == (2, "")
    assert "format-version" in found.stderr
    assert "Traceback" not in found.stderr
    assert "\x1b" not in found.stderr


def test_a_changed_byte_is_seen_when_all_are_read(store: Path) -> None:
    _altered(store)
    assert prefix(store) == 0
    with pytest.raises(PrefixRefused, match="damaged"):
        prefix(store, verify=True)


def test_no_folder() -> None:
    with pytest.raises(PrefixRefused, match="damaged"):
        prefix(Path("/no/such/folder"))


def test_a_deep_tree_is_drawn_without_growing_wider() -> None:
    tree: RadixTree[int] = RadixTree()
    for length in range(1, 200):
        tree.insert(b"", list(range(length)), length)
    nodes = list(_nodes(tree))
    heads = list(_heads(nodes))
    assert len(heads) == 199
    assert max(map(len, heads)) < 80
    assert heads[-1].endswith("198 levels down 198")
    assert all(_last_children(nodes))
