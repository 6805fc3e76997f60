"""Expressions that may explain which layers keep which cache, the plainest first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LARGEST = 64
"""The largest argument that may be a period, an offset or a number of layers."""

_PERIODS = range(2, 13)
"""Periods that code may have as a number."""

_PATTERN = re.compile(r"[A-Z*|+#-]{2,}")

Candidate = tuple[int, str]
"""What a condition costs, and its text: of those that explain as much, lists of names go before periods, those before
comparisons, and all of them before bare numbers."""


def layer_conditions(
    known: Sequence[Mapping[str, object]], counts: Sequence[int]
) -> Iterator[list[Candidate]]:
    """Yield conditions on the layer `i`: first those of one argument, then with those of two and of bare numbers.

    Args:
        known: The values of the arguments, one mapping a configuration.
        counts: How many layers each configuration has.
    """
    found: dict[str, int] = {}
    for some in (_of_one(known, counts), _of_more(known)):
        for cost, text in some:
            found.setdefault(text, cost)
        yield sorted(((cost, text) for text, cost in found.items()), key=lambda item: item[0])


def _of_one(known: Sequence[Mapping[str, object]], counts: Sequence[int]) -> Iterator[Candidate]:
    for name in sequences(known):
        yield from _of_sequence(name, [_value(names, name) for names in known], counts)
    for name in _positive(known):
        yield 20, f"(i + 1) % {name} == 0"
        yield 21, f"i % {name} == 0"
        yield 24, f"i % {name} == {name} // 2"
        yield 30, f"i < {name}"
        yield 31, f"i >= {name}"
        yield 26, f"i == {name}"
        for number in range(1, 4):
            yield 27, f"i % {name} == {number}"


def _of_more(known: Sequence[Mapping[str, object]]) -> Iterator[Candidate]:
    for name in _positive(known):
        for other in small_integers(known):
            if other != name:
                yield 22, f"i % {name} == {other}"
                yield 33, f"i >= {name} - {other}"
                yield 34, f"i >= {name} - {name} % {other}"
                yield 38, f"i < {name} + {other}"
    for period in _PERIODS:
        yield 50 + period, f"(i + 1) % {period} == 0"
        for rest in range(period - 1):
            yield 52 + period, f"i % {period} == {rest}"
    for number in range(1, 9):
        yield 70 + number, f"i < {number}"


def _positive(known: Sequence[Mapping[str, object]]) -> list[str]:
    return [name for name, values in small_integers(known).items() if max(values) >= 1]


def _of_sequence(name: str, values: Sequence[Any], counts: Sequence[int]) -> Iterator[Candidate]:
    usable = [
        (v, count) for v, count in zip(values, counts, strict=True) if isinstance(v, list | tuple | str)
    ]
    items = sorted(
        {item for v, _ in usable for item in v if isinstance(item, str | int)},
        key=lambda v: (str(type(v)), v),
    )
    if len(items) <= 12 and not all(type(item) is int for item in items):
        index = "i" if all(len(v) >= count for v, count in usable) else f"i % len({name})"
        for item in items:
            yield (10 if isinstance(item, str) else 12), f"{name}[{index}] == {literal(item)}"
    if items and all(type(item) is int for item in items):
        if all(len(v) >= count for v, count in usable) and len(items) <= 8:
            for item in items:
                yield 13, f"{name}[i] == {item}"
        yield 11, f"i in {name}"
        yield 12, f"i + 1 in {name}"


def sequences(known: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of lists and short strings, also those one level down: `linear_attn_config['kda_layers']`."""
    found: dict[str, None] = {}
    for names in known:
        for name, value in names.items():
            inner = value.items() if isinstance(value, Mapping) else ()
            pairs = [(name, value), *((f"{name}[{key!r}]", item) for key, item in inner if _usable(key))]
            for text, item in pairs:
                if _is_name(name) and _is_pattern(item):
                    found.setdefault(text)
    return list(found)


def small_integers(known: Sequence[Mapping[str, object]]) -> dict[str, list[int]]:
    """Return the arguments that can be a period or a number of layers, with their values."""
    found: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for names in known for name in names):
        values = [names.get(name) for names in known]
        whole = [value for value in values if type(value) is int and value >= 0]
        if len(whole) == len(values) and min(whole) <= _LARGEST and _is_name(name):
            found[name] = whole
    return found


def literal(value: str | int) -> str:
    """Return a value as an expression writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else f"'{value}'"


def _value(names: Mapping[str, object], name: str) -> Any:
    outer, _, key = name.partition("[")
    value: Any = names.get(outer)
    if not key:
        return value
    return value.get(key[1:-2]) if isinstance(value, Mapping) else None


def _is_pattern(value: object) -> bool:
    """Whether a value can say something of each layer; of strings only those in capitals and signs, such as `M-M*`."""
    if isinstance(value, str):
        return _PATTERN.fullmatch(value) is not None
    return isinstance(value, list | tuple) and all(isinstance(part, str | int) for part in value)


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None


def _usable(key: object) -> bool:
    return isinstance(key, str) and _is_name(key)
