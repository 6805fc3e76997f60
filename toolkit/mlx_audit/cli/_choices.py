"""Values of options that are one of a few words: checked before any work, with the nearest word named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_audit.errors import MlxAuditError

DTYPES = ("float32", "bfloat16", "float16")
"""What `--dtype` takes."""


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
