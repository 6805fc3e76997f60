"""From what `make_cache()` gave for several configurations to the rules that explain all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mlx_audit.manifests.conditions import Candidate, layer_conditions, sequences, small_integers
from mlx_audit.manifests.described import Rule, before, described
from mlx_audit.manifests.evaluation import evaluate, evaluate_condition
from mlx_audit.manifests.expressions import MAX_LENGTH, parse
from mlx_audit.manifests.observations import Observation, Unexplained, integers, shape
from mlx_audit.manifests.syntax import ExpressionError

_MOST_PAIRED = 60
"""Conditions that are tried two at a time."""


@dataclass
class Rules:
    """A topology, as a manifest has it, and what must be said of it.

    Attributes:
        count: An expression, or a number.
        notes: What no rule explains, by place: `count`, `layers`.
    """

    count: str | int
    layers: list[Rule]
    before: list[Rule] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def generalise(seen: Sequence[Observation]) -> Rules:
    """Return rules that explain every observation.

    Raises:
        Unexplained: says what has no explanation.
    """
    binding = [item for item in seen if item.binding]
    return Rules(_count(seen), _layers(binding), before(binding))


def written_out(seen: Sequence[Observation]) -> Rules:
    """Return the layers of each observation one by one, told apart by their number.

    Raises:
        Unexplained: the number itself has no explanation.
    """
    count = _count(seen)
    rules: list[Rule] = []
    shapes = list(dict.fromkeys(shape(spec) for item in seen for spec in item.layers or ()))
    numbers = [item.count for item in seen]
    if len(set(numbers)) < len(numbers):
        raise Unexplained("no rule tells which layers keep which cache")
    for name in shapes[1:]:
        for item in seen:
            layers = [at for at, spec in enumerate(item.layers or ()) if shape(spec) == name]
            for part in _short(f"{count} == {item.count} and i in ", layers):
                rules.append({"when": part, **described(name, seen)})
    return Rules(count, [*rules, described(shapes[0], seen)], before(seen))


def _short(start: str, layers: list[int]) -> Iterator[str]:
    """Yield conditions that name layers, none of them longer than an expression may be."""
    while layers:
        size = next(n for n in range(len(layers), 0, -1) if len(f"{start}{layers[:n]}") <= MAX_LENGTH)
        yield f"{start}{layers[:size]}"
        layers = layers[size:]


# --- the number of layers


def _count(seen: Sequence[Observation]) -> str:
    """Return the expression that gives the number of layers; of several, the one that also fits odd configurations."""
    best: tuple[int, int, str] | None = None
    for order, text in enumerate(_count_candidates([item.names for item in seen])):
        fits = [_equals(text, item.names, item.count) for item in seen]
        if all(fit for fit, item in zip(fits, seen, strict=True) if item.binding):
            ranked = (fits.count(False), order, text)
            best = ranked if best is None or ranked < best else best
    if best is None:
        raise Unexplained("no argument gives the number of layers", found=_numbers(seen))
    return best[2]


def _numbers(seen: Sequence[Observation]) -> str:
    return ", ".join(f"{item.count} for {item.label}" for item in seen if item.binding)


def _count_candidates(known: Sequence[Mapping[str, object]]) -> Iterator[str]:
    numbers = [name for name in integers(known) if "layer" in name]
    numbers.sort(key=lambda name: (name != "num_hidden_layers", not name.endswith("layers"), len(name)))
    lists = sequences(known)
    yield from numbers
    yield from (f"len({name})" for name in lists)
    yield from (f"{name} + {name}" for name in numbers)
    yield from (f"{name} - {other}" for name in numbers for other in numbers if name != other)


def _equals(text: str, names: Mapping[str, object], value: int) -> bool:
    try:
        return evaluate(parse(text), names) == value
    except ExpressionError:
        return False


# --- which layer keeps which cache


@dataclass(frozen=True)
class _Grid:
    """All layers of all observations, as bits of one number."""

    seen: Sequence[Observation]

    @property
    def all(self) -> int:
        return (1 << sum(len(item.layers or ()) for item in self.seen)) - 1

    def bits(self, text: str) -> int | None:
        """Return where a condition holds; None where it cannot be evaluated somewhere."""
        try:
            expression = parse(text)
            found = [
                evaluate_condition(expression, {**item.names, "i": at})
                for item in self.seen
                for at in range(len(item.layers or ()))
            ]
        except ExpressionError:
            return None
        return sum(1 << at for at, holds in enumerate(found) if holds)

    def of_shape(self, name: str) -> int:
        specs = [spec for item in self.seen for spec in item.layers or ()]
        return sum(1 << at for at, spec in enumerate(specs) if shape(spec) == name)


def _layers(seen: Sequence[Observation]) -> list[Rule]:
    known = [item for item in seen if item.layers is not None]
    shapes = list(dict.fromkeys(shape(spec) for item in known for spec in item.layers or ()))
    shapes.sort(
        key=lambda name: name != "none"
    )  # of rules that explain as much, those first that take layers out
    if len(shapes) == 1:
        return [described(shapes[0], known)]
    grid = _Grid(sorted(known, key=lambda item: item.count))
    bits: dict[str, int | None] = {}
    one, more = layer_conditions(_telling(known), [i.count for i in known])
    for candidates, joined in ((one, False), (more, False), (more, True)):
        for _, text in candidates:
            bits.setdefault(text, grid.bits(text) if text not in bits else None)
        ordered = _ordered(grid, shapes, _distinct(candidates, bits, grid.all), grid.all, joined=joined)
        if ordered is not None:
            break
    else:
        raise Unexplained("no rule tells which layers keep which cache", found=", ".join(shapes))
    rules = [{"when": text, **described(name, known)} for name, text in ordered[1]]
    return [*rules, described(ordered[2], known)]


def _telling(seen: Sequence[Observation]) -> list[Mapping[str, object]]:
    """Return the arguments without the numbers whose change alone was seen to change nothing."""
    names = list(small_integers([item.names for item in seen]))
    kept = {name for name in names if not _indifferent(name, seen)}
    idle = set(names) - kept
    return [{key: value for key, value in item.names.items() if key not in idle} for item in seen]


def _indifferent(name: str, seen: Sequence[Observation]) -> bool:
    """Whether there are observations that differ in this number alone, and all of them have the same layers."""
    groups: dict[tuple[object, ...], list[Observation]] = {}
    for item in seen:
        rest = tuple(repr(value) for key, value in item.names.items() if key != name and _counts(value))
        groups.setdefault(rest, []).append(item)
    alike = [group for group in groups.values() if len({item.names[name] for item in group}) > 1]
    return bool(alike) and all(len({tuple(item.layers or ()) for item in group}) == 1 for group in alike)


def _counts(value: object) -> bool:
    return isinstance(value, int | str | list | tuple | dict)


def _distinct(candidates: Sequence[Candidate], bits: Mapping[str, int | None], everywhere: int) -> _Found:
    """Return the conditions that hold somewhere but not everywhere; of those that hold alike, the cheapest."""
    found: dict[int, tuple[int, str, int]] = {}
    for cost, text in candidates:
        holds = bits[text]
        if holds and holds != everywhere:
            found.setdefault(holds, (cost, text, holds))
    return list(found.values())


_Ordered = tuple[int, list[tuple[str, str]], str]
_Found = list[tuple[int, str, int]]


def _ordered(grid: _Grid, shapes: list[str], found: _Found, left: int, *, joined: bool) -> _Ordered | None:
    """Return the cheapest rules, each of which holds for exactly the layers of its shape that are left to it."""
    if len(shapes) == 1:
        return 0, [], shapes[0]
    best: _Ordered | None = None
    for name in shapes:
        wanted = grid.of_shape(name) & left
        chosen = _condition(wanted, left, found, joined=joined)
        if chosen is None:
            continue
        others = [other for other in shapes if other != name]
        rest = _ordered(grid, others, found, left & ~wanted, joined=joined)
        if rest is None:
            continue
        cost = chosen[0] + rest[0]
        if best is None or cost < best[0]:
            best = cost, [(name, chosen[1]), *rest[1]], rest[2]
    return best


def _condition(wanted: int, left: int, found: _Found, *, joined: bool) -> Candidate | None:
    """Return the cheapest condition that holds for exactly the wanted ones of the layers that are left.

    Args:
        wanted: The layers that it must hold for.
        left: The layers that earlier rules leave.
        found: Conditions, and where they hold.
        joined: Whether two conditions may be joined.
    """
    exact = next(((cost, text) for cost, text, bits in found if bits & left == wanted), None)
    if exact is not None or not joined:
        return exact
    within = [item for item in found if item[2] & left and not item[2] & left & ~wanted][:_MOST_PAIRED]
    around = [item for item in found if not wanted & ~item[2]][:_MOST_PAIRED]
    return _joined("or", within, wanted, left) or _joined("and", around, wanted, left)


def _joined(word: str, found: _Found, wanted: int, left: int) -> Candidate | None:
    pairs = (
        (one[0] + two[0] + 20, f"{one[1]} {word} {two[1]}")
        for one, two in combinations(found, 2)
        if ((one[2] | two[2]) if word == "or" else (one[2] & two[2])) & left == wanted
    )
    return min(pairs, key=lambda item: item[0], default=None)
