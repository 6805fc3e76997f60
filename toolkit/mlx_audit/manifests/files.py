"""Reading files of anybody's: regular ones only, never more than is asked for, and JSON that stays small in memory."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_KEYS = 10_000
"""Keys of one JSON object; every one may be a mistake that is told, so they are bounded apart."""


def read_bounded(path: Path, most: int) -> bytes:
    """Return a file's bytes, at most `most` and one more: the caller sees that it is larger.

    Raises:
        OSError: there is none, it cannot be read, or it is no regular file. A pipe that nobody writes to would never
            end, and a device gives bytes for ever.
    """
    try:
        # Not waiting: the mere opening of a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(most + 1)


def read_json(path: Path, most_bytes: int, most_values: int) -> Any:
    """Return the value of a JSON file.

    A file of 1 MB can hold 300,000 empty objects: values are bounded too, not bytes alone. A key that is there twice is
    refused, because readers of the file would see another value than this one does.

    Raises:
        OSError: see `read_bounded`.
        ValueError: too large, no UTF-8, no JSON, half a surrogate pair, or an object with a key twice or with more
            than `MOST_KEYS`.
        RecursionError: nested too deeply.
    """
    data = read_bounded(path, most_bytes)
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes:,} bytes")
    # Each value but the first follows one of these; those inside strings are counted too, and allowed for.
    if sum(map(data.count, (b",", b"[", b"{"))) > most_values:
        raise ValueError(f"more than {most_values:,} values")
    value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    if b"\\ud" in data.lower():
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # half a surrogate pair could never be written or shown
    return value


def real(path: Path) -> Path:
    """Return `path.resolve()`; of a loop of links, the absolute path: what opens it says what is wrong."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # which of them depends on Python's version
        return path.absolute()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise ValueError(f"an object of more than {MOST_KEYS:,} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found
