"""The file in which adopters list what is known to fail, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests.files import read_bounded
from mlx_audit.manifests.problems import display, shown

_MOST_BYTES = 1 << 20
_LINE = re.compile(r"(?P<item>[^\s:#]+::[^\s:#]+::[^\s:#]+)\s+#\s*(?P<reason>\S.*)")


class KnownFailuresError(MlxAuditError):
    """The list cannot be read, or one of its lines says nothing, or not why."""


@dataclass(frozen=True)
class KnownFailure:
    """A failure that is expected.

    Attributes:
        item: `family::variant::check`, or `family::variant::verdict`.
        reason: Why it fails.
        where: File and line that say so.
    """

    item: str
    reason: str
    where: str

    @property
    def family(self) -> str:
        """The family that it speaks of."""
        return self.item.partition("::")[0]


def read_known_failures(file: Path) -> dict[str, KnownFailure]:
    """Return what a file lists, by item; lines that are empty or begin with `#` say nothing.

    Raises:
        KnownFailuresError: a line is of another form, or its item has a line already.
    """
    try:
        data = read_bounded(file, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes")
        lines = data.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise KnownFailuresError(
            "the known failures cannot be read", where=display(file), found=error
        ) from None
    known: dict[str, KnownFailure] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        where = f"{display(file)}:{number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise KnownFailuresError(
                "the line names no known failure with its reason",
                where=where,
                found=shown(line),
                allowed="family::variant::check  # reason",
            )
        item = match["item"]
        if item in known:
            raise KnownFailuresError(
                "the item is listed twice", where=where, found=item, fix=f"see {known[item].where}"
            )
        known[item] = KnownFailure(item, match["reason"], where)
    return known
