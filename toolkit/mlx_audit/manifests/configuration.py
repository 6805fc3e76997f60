"""A model's `config.json`: bounded, without duplicate keys and without NaN; every mistake with line and column.

`Infinity` is accepted: published configurations of state-space models have it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from mlx_audit.manifests.files import read_bounded
from mlx_audit.manifests.problems import ManifestError, Problem, display, shown

MAX_BYTES = 1024 * 1024
"""Size of a configuration."""
MAX_DEPTH = 40
"""Levels of nested objects and lists."""
MAX_DIGITS = 40
"""Digits of an integer."""

_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')


class ConfigurationError(ManifestError):
    """A configuration that cannot be read, or is not a JSON object."""


def load_configuration(path: Path) -> dict[str, Any]:
    """Read a `config.json`; ConfigurationError says where and what is wrong."""
    file = display(path)
    text = _text(path, file)
    problems = [
        Problem(file, *_position(text, at), what, found, allowed) for at, what, found, allowed in _scan(text)
    ]
    if problems:
        raise ConfigurationError(problems)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise ConfigurationError([Problem(file, error.lineno, error.colno, what)]) from None
    except ValueError as error:
        raise ConfigurationError([Problem(file, 1, 1, f"not JSON: {error}")]) from None
    if not isinstance(value, dict):
        raise ConfigurationError([Problem(file, 1, 1, "not a JSON object", shown(value), "an object: {…}")])
    return value


def _text(path: Path, file: str) -> str:
    def refuse(
        what: str, at: tuple[int, int] = (1, 1), allowed: str | None = None, found: str | None = None
    ) -> ConfigurationError:
        return ConfigurationError([Problem(file, *at, what, found, allowed)])

    try:
        data = read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise refuse(f"the file cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise refuse("the file is too large", allowed=f"at most {MAX_BYTES // 1024} KiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        raise refuse(
            "not UTF-8", _position(before, len(before)), found=f"byte {data[error.start]:#04x}"
        ) from None


def _position(text: str, at: int) -> tuple[int, int]:
    before = text[:at]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _scan(text: str) -> list[tuple[int, str, str, str | None]]:
    """Offsets of what Python's JSON reader would let pass, or answer without a place."""
    found: list[tuple[int, str, str, str | None]] = []
    levels: list[set[str]] = []
    previous: tuple[str, int] = ("", 0)
    for match in _PART.finditer(text):
        part, at = match.group(), match.start()
        if part in ("{", "["):
            levels.append(set())
            if len(levels) > MAX_DEPTH:
                return [*found, (at, "nested too deeply", part, f"at most {MAX_DEPTH} levels")]
        elif part in ("}", "]") and levels:
            levels.pop()
        elif part == ":" and levels and previous[0].startswith('"'):
            key = _key(previous[0])
            if key in levels[-1]:
                found.append((previous[1], "the key is there twice", shown(key), None))
            levels[-1].add(key)
        elif not part.startswith('"') and not _acceptable(part):
            found.append((at, "not a usable value", shown(part), "a finite number, true, false or null"))
        previous = (part, at)
    return found


def _key(part: str) -> str:
    try:
        return str(json.loads(part))
    except ValueError:
        return part


def _acceptable(part: str) -> bool:
    if part == "NaN" or len(part) > 400:
        return False
    if re.fullmatch(r"-?[0-9]+", part):
        return len(part) <= MAX_DIGITS
    if re.fullmatch(r"-?[0-9.]+([eE][-+]?[0-9]+)?", part):
        try:
            return math.isfinite(float(part))
        except ValueError:
            return True  # the JSON reader says what is wrong
    return True
