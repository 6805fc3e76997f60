"""Snapshots that outlive a process: a folder with one safetensors file an entry and a manifest, saved atomically.

Bodies are named by their digest, so none is ever replaced by another one. A save writes the new bodies, then moves the
new manifest over the old one, then removes what is not named in it. Killed at any point, it leaves the old store or the
new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_audit.prefix.fingerprint import Fingerprint
from mlx_audit.prefix.layers import ArrayForm, Layer
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.store_body import read_body, require_size, verify_body, write_body
from mlx_audit.prefix.store_files import (
    MANIFEST,
    digest_of,
    flush,
    locked,
    opened,
    publish,
    size_of,
    sweep,
    temporary,
)
from mlx_audit.prefix.store_format import MOST_MANIFEST, StatedEntry, packed, parsed, require_stops, written


@dataclass(frozen=True)
class StoredEntry:
    """An entry of a loaded store. Its arrays are read, and its checksum is verified, when they are first wanted.

    Attributes:
        path: Its body.
        tokens: Its key, packed int32.
        size: Bytes of the body.
        layers: Its stack without arrays, from which a restore can be planned.
        stops: Where the chunks ended that made it; None: not known.
        kind: Where it was taken: `output`, `checkpoint` or `prompt`.
    """

    path: Path
    tokens: bytes
    size: int
    layers: tuple[Layer, ...]
    stops: tuple[int, ...] | None = None
    kind: str = "prompt"

    @property
    def ids(self) -> list[int]:
        """Its key."""
        return [int(token) for token in np.frombuffer(self.tokens, "<i4")]

    @property
    def position(self) -> int:
        """Tokens of its key, which every layer has taken in."""
        return len(self.tokens) // 4

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in memory, known before they are read."""
        return sum(layer.nbytes for layer in self.layers)

    def snapshot(self) -> Snapshot:
        """Read the entry, whole or not at all.

        Raises:
            PrefixRefused: damaged: the file was cut, altered or removed since.
        """
        return Snapshot(self.position, self.layers, read_body(self.path, self.size, self._forms))

    def verify(self) -> None:
        """Refuse a body that is not what was written; no array is made."""
        verify_body(self.path, self.size, self._forms)

    @property
    def _forms(self) -> list[ArrayForm]:
        return [form for layer in self.layers for form in layer.leaves]


class SavedEntry(NamedTuple):
    """An entry to save; `stops` and `kind` are those of `StoredEntry`."""

    tokens: Sequence[int]
    snapshot: Snapshot
    stops: tuple[int, ...] | None = None
    kind: str = "prompt"


def save(
    folder: Path,
    entries: Iterable[SavedEntry | tuple[Sequence[int], Snapshot]],
    fingerprint: Fingerprint,
    *,
    wait: float = 60.0,
) -> int:
    """Write entries, each with its key, as the whole content of a store; return the bytes of its files.

    Args:
        folder: The store; made where it is missing. Files that are not the store's stay.
        entries: Keys and snapshots, least recently used first: `load` keeps the order.
        fingerprint: What they depend on.
        wait: Seconds to wait for another process that saves to the same store.

    Raises:
        PrefixRefused: position-mismatch: a key has another length than its snapshot; busy; too-large. The old store
            is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, wait):
        stated: dict[bytes, StatedEntry] = {}
        for tokens, snapshot, stops, kind in (SavedEntry(*entry) for entry in entries):
            key = packed(tokens)
            if len(key) // 4 != snapshot.position:
                raise PrefixRefused(
                    Reason.POSITION_MISMATCH,
                    where="save",
                    found=snapshot.position,
                    allowed=f"{len(key) // 4}, the length of the key",
                )
            stated.pop(key, None)
            require_stops(stops, snapshot.position, "save")
            stated[key] = replace(_save_body(folder, key, snapshot), stops=stops, kind=kind)
        text = written(fingerprint.parts, list(stated.values()))
        place = temporary(folder, MANIFEST)
        place.write_bytes(text)
        flush(folder)  # the bodies' names, before a manifest that names them
        publish(place, folder / MANIFEST)
        flush(folder)
        sweep(folder, {entry.body for entry in stated.values()})
    return len(text) + sum({entry.body: entry.size for entry in stated.values()}.values())


def load(folder: Path, fingerprint: Fingerprint, *, verify: bool = False) -> list[StoredEntry]:
    """Open a store that was saved with the same fingerprint, all of it or nothing.

    The manifest is verified here, and that every body is there in its full length. A body's checksum is verified when
    its arrays are first read, or here with `verify`, which reads every byte.

    Raises:
        PrefixRefused: format-version, other-fingerprint, unknown-field, unknown-class, damaged, position-mismatch.
    """
    parts, stated = read_manifest(folder)
    fingerprint.require_same(parts, str(folder / MANIFEST))
    entries = [
        StoredEntry(folder / entry.body, entry.tokens, entry.size, entry.layers, entry.stops, entry.kind)
        for entry in stated
    ]
    for entry in entries:
        require_size(entry.path, entry.size)
        if verify:
            entry.verify()
    return entries


def read_manifest(folder: Path) -> tuple[dict[str, str], list[StatedEntry]]:
    """Return the fingerprint's parts and the entries of a store, without asking whose it is or opening a body.

    Raises:
        PrefixRefused: format-version, unknown-field, unknown-class, damaged, position-mismatch.
    """
    path = folder / MANIFEST
    with opened(path) as file:
        size = size_of(file)
        if size > MOST_MANIFEST:
            raise PrefixRefused(
                Reason.TOO_LARGE, "not a manifest", where=str(path), found=size, allowed=MOST_MANIFEST
            )
        text = file.read(MOST_MANIFEST + 1)
    return parsed(text, str(path))


def _save_body(folder: Path, key: bytes, snapshot: Snapshot) -> StatedEntry:
    """Write the arrays of one entry under the name that their bytes give."""
    place = temporary(folder, "body.safetensors")
    write_body(place, list(snapshot.arrays.values()))
    with place.open("rb") as file:
        size, name = size_of(file), f"{digest_of(file)}.safetensors"
    publish(place, folder / name)
    return StatedEntry(key, name, size, snapshot.layers)
