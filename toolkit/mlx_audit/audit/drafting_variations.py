"""Configurations near a tiny one: another number of layers, another pattern, another period, another window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

_SMALL = 24
"""Integers up to this are varied: periods, offsets, numbers of layers, windows."""

_LISTS = (list, str)


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
    places: list[tuple[str, ...]] = [(), *((key,) for key, item in config.items() if isinstance(item, Mapping))]
    return max(places, key=lambda place: (len(names & _at(config, place).keys()), -len(place)))


def _changes(
    config: Mapping[str, Any], known: Mapping[str, Any], count: int
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    lists = {name: value for name, value in config.items() if _per_layer(value, count)}
    counted = [name for name, value in known.items() if value == count and name.endswith(("layers", "layer"))]
    for number in (count + 1, count + 2, count + 3, 2 * count, 3 * count + 1):
        longer = {name: _cycled(value, number) for name, value in lists.items()}
        yield f"{number} layers", {**config, **longer, **dict.fromkeys(counted, number)}, True
    for name in counted:
        yield f"{name} {count + 1} alone", {**config, name: count + 1}, False
    for shift in range(1, min(count, 5)):
        turned = {name: value[shift:count] + value[:shift] + value[count:] for name, value in lists.items()}
        if any(turned[name] != lists[name] for name in lists):
            yield f"the pattern turned by {shift}", {**config, **turned}, True
    for name, value in lists.items():
        yield f"{name} reversed", {**config, name: value[:count][::-1] + value[count:]}, True
    yield from _numbers_changed(config, known, count, set(counted))
    yield from _sets_changed(config, count)


def _numbers_changed(
    config: Mapping[str, Any], known: Mapping[str, Any], count: int, apart: set[str]
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    number = 2 * count + 1
    lists = {key: _cycled(item, number) for key, item in config.items() if _per_layer(item, count)}
    longer = {**config, **lists, **dict.fromkeys(apart, number)}
    for name, value in known.items():
        if type(value) is not int or not 0 <= value <= _SMALL or name in apart:
            continue
        for other in (value + 1, value - 1):
            if other >= 1:  # a size of nothing is divided by in code that no exception leaves
                yield f"{name} {other} with {number} layers", {**longer, name: other}, True


def _sets_changed(config: Mapping[str, Any], count: int) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Move the layers that a list names by one."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            for label, changed, binding in _sets_changed(value, count):
                yield f"{name}.{label}", {**config, name: changed}, binding
        elif _numbers(value) and len(value) < count:
            for shift in (1, -1):
                moved = [at + shift for at in value if 0 <= at + shift < count]
                if moved:
                    yield f"{name} moved by {shift}", {**config, name: moved}, True


def _per_layer(value: Any, count: int) -> bool:
    return isinstance(value, _LISTS) and count > 1 and count <= len(value) <= count + 3


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _cycled(value: Any, number: int) -> Any:
    return (value * (number // len(value) + 1))[:number]


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
