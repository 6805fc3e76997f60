"""Configurations near a tiny one: another number of layers, another pattern, another period, another window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

_SMALL = 24
"""Integers up to this are varied: periods, offsets, numbers of layers, windows."""

_SPARE = 3
"""Entries that such a list may have beyond the layers."""


@dataclass(frozen=True)
class Variation:
    """A changed configuration, what was changed, and whether its values still agree with each other."""

    label: str
    config: dict[str, Any]
    binding: bool = True


def variations(config: Mapping[str, Any], objects: Iterable[Any], count: int) -> Iterator[Variation]:
    """Yield changed configurations.

    Args:
        config: A tiny configuration.
        objects: What the topology's expressions may speak of; their defaulted fields are varied too.
        count: How many layers there are.
    """
    homes: dict[tuple[str, ...], dict[str, Any]] = {}
    for item in objects:
        home = home_of(config, item)
        homes.setdefault(home, {}).update(_left(item, _at(config, home)))
    for home, left in homes.items():
        inner = _at(config, home)
        for label, changed, binding in _changes(inner, {**inner, **left}, count):
            yield Variation(label, _put(config, home, changed), binding)


def home_of(config: Mapping[str, Any], arguments: Any) -> tuple[str, ...]:
    """Return where in a configuration the arguments' values are: the mapping that shares most keys with them."""
    names = {field.name for field in fields(arguments)} if is_dataclass(arguments) else set(vars(arguments))
    places: list[tuple[str, ...]] = [
        (),
        *((key,) for key, item in config.items() if isinstance(item, Mapping)),
    ]
    return max(places, key=lambda place: (len(names & _at(config, place).keys()), -len(place)))


def _changes(
    config: Mapping[str, Any], known: Mapping[str, Any], count: int
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    counted = [name for name, value in known.items() if value == count and name.endswith(("layers", "layer"))]

    def longer(number: int) -> dict[str, Any]:
        return {**_resized(config, count, number), **dict.fromkeys(counted, number)}

    for number in (count + 1, count + 2, count + 3, 2 * count, 2 * count + 1, 3 * count + 1):
        yield f"{number} layers", longer(number), True
    for name in counted:
        yield f"{name} {count + 1} alone", {**config, name: count + 1}, False
    yield from _turned(config, count)
    yield from _moved(config, count)
    number = 2 * count + 1
    for name, value in known.items():
        if type(value) is not int or not 0 <= value <= _SMALL or name in counted:
            continue
        for other in (value + 1, value - 1, value + count // 2 + 1):
            if other >= 1:  # a size of nothing is divided by in code that no exception leaves
                yield f"{name} {other} with {number} layers", {**longer(number), name: other}, True


def _turned(config: Mapping[str, Any], count: int) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Turn all lists of one entry a layer alike, and each of them alone, also those of mappings inside."""
    lists = {name: value for name, value in config.items() if _per_layer(value, count)}
    for shift in range(1, min(count, 5)):
        yield f"the pattern turned by {shift}", {**config, **_all_turned(lists, shift, count)}, True
    for name, value in lists.items():
        yield f"{name} reversed", {**config, name: value[:count][::-1] + value[count:]}, True
        yield f"{name} turned", {**config, **_all_turned({name: value}, 1, count)}, True
    for name, value in config.items():
        if isinstance(value, Mapping):
            for label, changed, binding in _turned(value, count):
                yield f"{name}: {label}", {**config, name: changed}, binding


def _all_turned(lists: Mapping[str, Any], shift: int, count: int) -> dict[str, Any]:
    return {name: value[shift:count] + value[:shift] + value[count:] for name, value in lists.items()}


def _moved(config: Mapping[str, Any], count: int) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Move the layers that a list names by one."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            for label, changed, binding in _moved(value, count):
                yield f"{name}: {label}", {**config, name: changed}, binding
        elif _numbers(value) and len(value) < count:
            for shift in (1, -1):
                moved = [at + shift for at in value if 0 <= at + shift < count]
                if moved:
                    yield f"{name} moved by {shift}", {**config, name: moved}, True


def _resized(config: Mapping[str, Any], count: int, number: int) -> dict[str, Any]:
    """Repeat lists of one entry a layer for another number of layers."""
    found = dict(config)
    for name, value in config.items():
        if isinstance(value, Mapping):
            found[name] = _resized(value, count, number)
        elif _per_layer(value, count):
            found[name] = (value[:count] * (number // count + 1))[:number]
    return found


def _per_layer(value: Any, count: int) -> bool:
    """Whether a value can be a list with an entry a layer, or a string with a letter a layer."""
    if isinstance(value, str):
        return len(value) == count and value.upper() == value
    return isinstance(value, list) and count > 1 and count <= len(value) <= count + _SPARE


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _left(arguments: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a configuration leaves to defaults, in the order of the arguments' fields."""
    named = [field.name for field in fields(arguments) if field.init] if is_dataclass(arguments) else []
    return {name: getattr(arguments, name, None) for name in named if name not in config}


def _at(config: Mapping[str, Any], place: Sequence[str]) -> Mapping[str, Any]:
    for key in place:
        config = config[key]
    return config


def _put(config: Mapping[str, Any], place: Sequence[str], changed: dict[str, Any]) -> dict[str, Any]:
    if not place:
        return changed
    return {**config, place[0]: _put(config[place[0]], place[1:], changed)}
