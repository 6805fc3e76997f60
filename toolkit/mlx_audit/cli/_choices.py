"""Values of options that are one of a few words: checked before any work, with the nearest word named."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlx_audit.errors import EnvironmentUnfit, MlxAuditError

DTYPES = ("float32", "bfloat16", "float16")
"""What `--dtype` takes."""


MOST_SECONDS = 604_800.0
"""The longest time-out: a week."""

MOST_SEED = 2**64 - 1
"""What MLX takes."""


class UnknownChoice(MlxAuditError):
    """An option has a value that it does not know."""


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """Return the value, or raise UnknownChoice."""
    if value in allowed:
        return value
    from mlx_audit.manifests.suggestions import did_you_mean

    raise UnknownChoice(
        f"unknown value of {option}",
        found=repr(value),
        allowed=", ".join(allowed),
        fix=did_you_mean(value, allowed) or did_you_mean(value.upper(), allowed),
    )


def each_of(option: str, values: Iterable[str], allowed: Sequence[str]) -> list[str]:
    """Return the values of an option that may be repeated and may hold commas, without repetition."""
    words = [word.strip() for value in values for word in value.split(",")]
    return list(dict.fromkeys(one_of(option, word, allowed) for word in words))


def seconds(option: str, value: float) -> float:
    """Return a time-out, or refuse one that no clock can wait for."""
    if math.isfinite(value) and 0 < value <= MOST_SECONDS:
        return value
    raise MlxAuditError(
        "no usable time-out", where=option, found=value, allowed=f"up to {MOST_SECONDS:,.0f} seconds"
    )


def target(text: str) -> str:
    """Return a TARGET that has at least one character; `Path` would take none for the working directory."""
    if not text.strip():
        raise MlxAuditError("the target is empty", where="TARGET", found=repr(text))
    return text


def output(option: str, path: str | Path) -> Path:
    """Return a file to write, or refuse, before any work, what cannot be one.

    What is no file but can be written, such as a pipe, is taken.
    """
    if str(path) in ("", "."):
        raise MlxAuditError("no file name", where=option, found=repr(str(path)))
    place = Path(path).absolute()
    if place.is_dir():
        raise MlxAuditError("this is a folder", where=f"{option} {path}", allowed="the name of a file")
    if not place.parent.is_dir():
        raise MlxAuditError("it cannot be written", where=f"{option} {path}", found="no such folder")
    writable = os.access(place if place.exists() else place.parent, os.W_OK)
    if not writable:
        raise MlxAuditError("it cannot be written", where=f"{option} {path}", found="no permission")
    return place


def require_temporary_folder() -> None:
    """Refuse, before any work, a temporary folder in which MLX's CPU backend could not compile."""
    from mlx_audit.audit.diagnosis import temporary_folder_obstacle

    obstacle = temporary_folder_obstacle()
    if obstacle is not None:
        raise EnvironmentUnfit(obstacle.what, where="TMPDIR", fix=obstacle.fix)
