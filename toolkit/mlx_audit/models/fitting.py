"""A tiny configuration that is known to build, to run, and to have every form of layer that the real one has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from mlx_lm.models import cache as native

from mlx_audit.errors import MlxAuditError, TargetError
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.live import leaves
from mlx_audit.models.observed import Form, Observed, observe, run_lazily
from mlx_audit.models.tiny import Plan, layer_count, shrink

WINDOW = 8
"""Tokens that a window or chunk keeps: a short run turns it several times."""

_MOST_LAYERS = 16


@dataclass(frozen=True)
class Fitted:
    """A tiny configuration, its model, and which forms of layers of the real one it lacks."""

    config: dict[str, Any]
    observed: Observed
    arguments: Any
    lacking: frozenset[Form] = frozenset()


def fitted_tiny(module: ModuleType, config: Mapping[str, Any], real: Observed) -> Fitted:
    """Return a tiny configuration; the first that has every form of layer, else the one that lacks fewest.

    Raises:
        TargetError: none of them can be built and run.
    """
    best: Fitted | None = None
    failure: Exception | None = None
    for base, plan in _attempts(module, config, real):
        try:
            found = _turning(module, shrink(base, plan, real.count), real)
        except Exception as error:
            failure = failure or error
            continue
        if best is None or len(found.lacking) < len(best.lacking):
            best = found
        if not best.lacking:
            break
    if best is None:
        raise TargetError(
            "no tiny configuration can be made of this one",
            where=module.__name__,
            found=str(failure),
            fix="give a small one with --config",
        ) from failure
    return best


def tiny_of(module: ModuleType, config: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny configuration that runs; where there is none, one that shows why."""
    tiny = shrink(config)
    if tiny == config:
        return tiny
    try:
        return fitted_tiny(
            module, config, observe(build_lazy(module, resolve_arguments(module, config)))
        ).config
    except Exception:
        return tiny


def _attempts(
    module: ModuleType, config: Mapping[str, Any], real: Observed
) -> Iterator[tuple[Mapping[str, Any], Plan]]:
    """Yield what may be shrunk, and how: the configuration with the sizes that it leaves to the code, then without."""
    sizes = {field.name: field.default for field in fields(module.ModelArgs) if type(field.default) is int}
    # Only those that are made smaller say something.
    small = shrink({"hidden_size": sys.maxsize, **sizes}, Plan(wide=True), real.count)
    left = {name: value for name, value in sizes.items() if small[name] < value and name not in config}
    for base in [{**config, **left}, config] if left else [config]:
        for plan in _plans(real, layer_count(base)):
            yield base, plan


def _plans(real: Observed, count: int | None) -> Iterator[Plan]:
    chosen = _representative(real)
    for wide in (False, True):
        for layers in (range(4), chosen, range(5), range(6), range(8), range(12), range(_MOST_LAYERS)):
            if count is not None and layers and max(layers) >= count:
                layers = range(count)
            for period, some in ((0, 0), (2, 1), (0, 1), (2, 2), (3, 2)):
                yield Plan(tuple(layers), period, some, wide)


def _representative(real: Observed) -> list[int]:
    """Return the numbers of the first two layers of each form, or of the first one where there are many forms."""
    where: dict[Form, list[int]] = {}
    for at, form in enumerate(real.layer_forms):
        where.setdefault(form, []).append(at)
    each = 2 if len(where) <= _MOST_LAYERS // 2 else 1
    chosen = {at for places in where.values() for at in places[:each]}
    for at in range(real.count):
        if len(chosen) >= min(3, real.count):
            break
        chosen.add(at)
    return sorted(chosen)


def try_out(module: ModuleType, config: Mapping[str, Any]) -> tuple[Observed, Any]:
    """Build a configuration and run it unevaluated; return what it shows, and its arguments.

    Raises:
        Exception: whatever the model's code raises.
    """
    arguments = resolve_arguments(module, config)
    model = build_lazy(module, arguments)
    found = observe(model)
    run_lazily(model, native.make_prompt_cache(model))
    return found, arguments


def _turning(module: ModuleType, config: dict[str, Any], real: Observed) -> Fitted:
    """Return a configuration, tried out, with windows that a short run turns, whatever their key is called."""
    found, arguments = try_out(module, config)
    for value in sorted(_windows(found)):
        if value <= WINDOW:
            continue
        for place in _places(config, value):
            changed = _changed(config, place, WINDOW)
            try:
                after, its = try_out(module, changed)
            except MlxAuditError:
                continue
            if value not in _windows(after):
                config, found, arguments = changed, after, its
                break
    return Fitted(config, found, arguments, frozenset(real.forms - found.forms))


def _windows(observed: Observed) -> set[int]:
    parts = [part for spec in observed.entries for part in leaves(spec)]
    return {value for part in parts for name, value in part.parameters if name in ("window", "chunk")}


def _places(config: Mapping[str, Any], value: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, item in config.items():
        if isinstance(item, Mapping):
            found += [(key, *place) for place in _places(item, value)]
        elif type(item) is int and item == value:
            found.append((key,))
    return found


def _changed(config: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(place) == 1:
        return {**config, place[0]: value}
    return {**config, place[0]: _changed(config[place[0]], place[1:], value)}
