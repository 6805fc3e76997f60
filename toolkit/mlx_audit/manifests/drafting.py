"""A drafted manifest as text: the keys in the order of the shipped ones, the same bytes for the same draft."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from pydantic import BaseModel, ConfigDict

_HEAD = "# yaml-language-server: $schema=../schemas/manifest.schema.json"
_WIDTH = 118
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "null", "none", "yes", "no", "on", "off", "y", "n"}
_LARGEST_FLOAT = 1.0e308
"""Stands for infinity, which published configurations have, and manifests don't."""


class Draft(BaseModel):
    """What a drafted manifest says.

    Attributes:
        layers, before: The rules of the topology, as a manifest has them.
        notes: Comments, by the key above which they stand: `sources`, `layers`, `rope`, `exactness`,
            `claims`, `configurations`.
        hazardous: Whether reading found a line that stands in the way of this configuration; it is not written.
    """

    model_config = ConfigDict(extra="forbid")

    family: str
    module: str
    about: str
    sources: list[str]
    arguments: str
    count: str | int
    layers: list[dict[str, Any]]
    before: list[dict[str, Any]] = []
    rope: list[str] = []
    variant: str
    exactness: str
    tiny: dict[str, Any]
    configurations: list[str] = []
    requires: dict[str, str]
    notes: dict[str, list[str]] = {}
    hazardous: bool = False


def manifest_text(draft: Draft) -> str:
    """Return the manifest."""
    return "\n".join(_lines(draft)) + "\n"


def _lines(draft: Draft) -> Iterator[str]:
    def note(key: str, indent: int = 0) -> Iterator[str]:
        for text in draft.notes.get(key, []):
            yield from _comment(text, indent)

    yield _HEAD
    yield f"family: {_scalar(draft.family)}"
    yield f"module: {_scalar(draft.module)}"
    yield f"about: {_scalar(draft.about)}"
    yield from note("sources")
    yield "sources:"
    yield from (f"  - {_scalar(text)}" for text in draft.sources)
    yield f"arguments: {_scalar(draft.arguments)}"
    yield "topology:"
    yield f"  count: {_scalar(draft.count)}"
    if draft.before:
        yield "  before:"
        yield from _rules(draft.before)
    yield from note("layers", 2)
    yield "  layers:"
    yield from _rules(draft.layers)
    yield from note("rope")
    if draft.rope:
        yield f"rope: {_flow(draft.rope)}"
    yield "variants:"
    yield f"  {draft.variant}:"
    yield from note("exactness", 4)
    yield f"    exactness: {draft.exactness}"
    yield "    tiny:"
    yield from _block(draft.tiny, 6)
    yield from note("claims", 4)
    yield "    claims: {compiled_decode: undecided}"
    yield from note("configurations")
    if draft.configurations:
        yield "configurations:"
        yield from (f"  - {_scalar(name)}" for name in draft.configurations)
    yield f"requires: {_flow(draft.requires)}"


def _comment(text: str, indent: int) -> list[str]:
    """Wrap a remark; what foreign code says in it stays on comment lines."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    start = " " * indent + "# "
    return wrap(
        plain,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=f"{start}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _rules(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for rule in rules:
        line = f"    - {_flow(rule)}"
        if len(line) <= _WIDTH:
            yield line
            continue
        for at, (key, value) in enumerate(rule.items()):
            yield f"    {'- ' if at == 0 else '  '}{key}: {_flow(value)}"


def _block(values: Mapping[str, Any], indent: int) -> Iterator[str]:
    """One line a key; mappings that don't fit on a line get a block of their own."""
    space = " " * indent
    for key, value in values.items():
        line = f"{space}{_scalar(key)}: {_flow(value)}"
        if isinstance(value, Mapping) and value and (len(value) > 4 or len(line) > _WIDTH):
            yield f"{space}{_scalar(key)}:"
            yield from _block(value, indent + 2)
        elif len(line) > _WIDTH and isinstance(value, list):
            yield from _long_list(f"{space}{_scalar(key)}:", value, indent + 2)
        else:
            yield line


def _long_list(head: str, values: Sequence[Any], indent: int) -> Iterator[str]:
    yield head
    text = ", ".join(map(_flow, values))
    start = " " * indent
    yield from wrap(
        f"[{text}]",
        _WIDTH,
        initial_indent=start,
        subsequent_indent=f"{start} ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _float(value: float) -> str:
    """Return a float as YAML 1.1 reads it: with a point, and the exponent with its sign."""
    if math.isinf(value):
        value = math.copysign(_LARGEST_FLOAT, value)
    mantissa, _, exponent = repr(value).partition("e")
    mantissa += "" if "." in mantissa else ".0"
    if not exponent:
        return mantissa
    return f"{mantissa}e{exponent}" if exponent[0] in "+-" else f"{mantissa}e+{exponent}"


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\u{ord(character) & 0xFFFF:04x}"
