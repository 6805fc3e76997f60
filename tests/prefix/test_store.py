"""A store outlives its process, and refuses whatever is not exactly what was written for exactly this model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_audit.prefix.fingerprint import Fingerprint
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.snapshot_fit import require_fitting
from mlx_audit.prefix.store import StoredEntry, load, save
from mlx_audit.prefix.store_files import MANIFEST, locked
from mlx_audit.prefix.store_format import packed
from prefix_models import KEY, MODELS, WORLD, Run, bodies, prefilled, refused, snapshot, subject, text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_entries_come_back_in_order_with_keys_layers_and_bytes_known_unread(store: Path) -> None:
    entries = load(store, WORLD)
    assert [entry.ids for entry in entries] == [KEY[:20], KEY, text(9, 2)]
    for entry, (family, length) in zip(
        entries, [("gemma3_text", 20), ("gemma3_text", 40), ("falcon_h1", 9)], strict=True
    ):
        wanted = snapshot(family, length)
        assert (entry.position, entry.nbytes, entry.layers) == (length, wanted.nbytes, wanted.layers)
        assert entry.snapshot().digest() == wanted.digest()
        require_fitting(entry.layers, Run(subject(family)).caches)


@pytest.mark.nightly
def test_another_process_reads_the_same_bytes_of_every_family(tmp_path: Path) -> None:
    wanted = []
    for family in MODELS:
        kept = snapshot(family)
        save(tmp_path / family, [(KEY, kept)], WORLD)
        wanted.append(kept.digest())
    script = (
        "import sys; from pathlib import Path; from mlx_audit.prefix.store import load;"
        "from mlx_audit.prefix.fingerprint import Fingerprint;"
        "world = Fingerprint(weights='tiny', tenant='test');"
        "read = [load(Path(sys.argv[1]) / name, world)[0].snapshot() for name in sys.argv[2:]];"
        "print(*(found.digest() for found in read))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *MODELS], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == wanted


def test_saving_again_replaces_the_content_and_leaves_no_litter(store: Path) -> None:
    foreign = store / "notes.txt"
    foreign.write_text("mine")
    (store / ".new-body.safetensors").write_bytes(b"left by a dead process")
    kept = snapshot(length=20)
    before = {path.name for path in bodies(store)}
    save(store, [(KEY[:20], kept)], WORLD)
    assert {entry.position for entry in load(store, WORLD)} == {20}
    assert sorted(contents(store)) == sorted([bodies(store)[0].name, MANIFEST, "notes.txt"])
    assert bodies(store)[0].name in before, "the same arrays have the same name"
    save(store, [], WORLD)
    assert load(store, WORLD) == []
    assert sorted(contents(store)) == [MANIFEST, "notes.txt"]


def test_of_two_entries_with_one_key_the_later_one_is_kept(tmp_path: Path) -> None:
    first, second = snapshot(length=20), Snapshot.take(prefilled("gemma3_text", 20, seed=5).caches, 20)
    save(tmp_path, [(KEY[:20], first), (KEY[:20], second)], WORLD)
    [entry] = load(tmp_path, WORLD, verify=True)
    assert entry.snapshot().digest() == second.digest() != first.digest()
    assert len(bodies(tmp_path)) == 1


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (KEY[:39], Reason.POSITION_MISMATCH),
        ([*KEY[:39], -1], Reason.KEY_MISMATCH),
        ([*KEY[:39], 2**31], Reason.KEY_MISMATCH),
        ([*KEY[:39], 1.5], Reason.KEY_MISMATCH),
        ([KEY], Reason.KEY_MISMATCH),
    ],
)
def test_a_refused_save_leaves_the_old_store(store: Path, key: Any, reason: Reason) -> None:
    before = contents(store)
    with pytest.raises(PrefixRefused) as caught:
        save(store, [(KEY, snapshot()), (key, snapshot())], WORLD)
    assert caught.value.reason is reason
    assert contents(store) == before


def test_a_store_that_another_process_saves_to_is_busy_until_it_ends(store: Path) -> None:
    before = contents(store)
    with locked(store, 1):
        with pytest.raises(PrefixRefused) as caught:
            save(store, [], WORLD, wait=0.05)
        assert caught.value.reason is Reason.BUSY
    assert contents(store) == before
    save(store, [], WORLD, wait=0.05)


def test_every_field_of_the_fingerprint_is_asked_for(store: Path) -> None:
    for name in ("weights", "quantization", "window", "dtype", "tenant"):
        error = refused(store, Fingerprint(**{"weights": "tiny", "tenant": "test", name: "other"}))
        assert error.reason is Reason.OTHER_FINGERPRINT
        assert f"another {name}" in str(error)


def test_a_save_does_not_write_through_a_link_that_waits_for_it(store: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in (".new-body.safetensors", f".new-{MANIFEST}"):
        (store / name).symlink_to(outside)
    save(store, [(KEY, snapshot())], WORLD)
    assert outside.read_text() == "mine"
    assert len(load(store, WORLD, verify=True)) == 1


def test_a_stack_of_another_window_kind_or_length_does_not_fit_a_model(store: Path) -> None:
    entry: StoredEntry = load(store, WORLD)[1]
    fresh = Run(subject("gemma3_text")).caches
    require_fitting(entry.layers, fresh)
    fresh[2].max_size = 17
    for caches, told in (
        (fresh, "another max_size"),
        (fresh[:3], "another layers"),
        (Run(subject("llama")).caches, "another cache kind"),
        (Run(subject("qwen3_next")).caches, "another cache kind"),
    ):
        with pytest.raises(PrefixRefused, match=told) as caught:
            require_fitting(entry.layers, caches)
        assert caught.value.reason is Reason.OTHER_FINGERPRINT


def test_keys_are_packed_as_the_index_packs_them() -> None:
    assert packed([1, 2**31 - 1]) == b"\x01\0\0\0\xff\xff\xff\x7f"
    assert packed([]) == b""
