"""What the index holds for one entry: a snapshot, in memory or still in its file, and the chunks that made it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator

from mlx_audit.prefix.grid import Stops
from mlx_audit.prefix.layers import Layer
from mlx_audit.prefix.snapshot import Snapshot
from mlx_audit.prefix.store import StoredEntry


class Held:
    """A snapshot with the positions at which its chunks ended; never changes, but for being read once.

    Attributes:
        position: Tokens of its key.
        layers: One for each native cache.
        stops: Where the chunks ended that made it, its own position among them; None: not known.
    """

    def __init__(self, source: Snapshot | StoredEntry, stops: Stops | None = None) -> None:
        self.position = source.position
        self.layers: tuple[Layer, ...] = source.layers
        self.stops = stops
        self._source = source
        self._lock = threading.Lock()

    @property
    def leaves(self) -> Iterator[tuple[Hashable, int]]:
        """Identity and bytes of each array. What is still in a file counts as if it had been read."""
        source = self._source
        if isinstance(source, Snapshot):
            yield from source.leaves
            return
        forms = (form for layer in self.layers for form in layer.leaves)
        yield from (((id(self), index), form.nbytes) for index, form in enumerate(forms))

    def snapshot(self) -> Snapshot:
        """Return the snapshot, read from its file at the first call.

        Raises:
            PrefixRefused: damaged: the file was cut, altered or removed since.
        """
        with self._lock:
            if isinstance(self._source, StoredEntry):
                self._source = self._source.snapshot()
            return self._source
