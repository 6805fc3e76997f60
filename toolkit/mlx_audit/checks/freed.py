"""What must go: the model and everything made for it, once nobody refers to them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import _BaseCache

from mlx_audit.adapters import parameter_slots
from mlx_audit.adapters.module_state import ModuleState
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.failing import failing, middle_layer, must_fail
from mlx_audit.checks.memory import active_memory, growth_since, no_spare_buffers
from mlx_audit.checks.runs import session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession, DecodeStep
from mlx_audit.decode.counted import CountedCompile

_WATCHED = (CompiledDecodeSession, nn.Module, DecodeStep, CountedCompile, FixedCapacityCache, _BaseCache)
"""Classes whose objects must go, those first that a failure names first."""


class ModelFreed(Check):
    """The model and its caches are freed.

    What it does:
        Builds a model, decodes with it in every way (prefill, compiled steps, extend, a copy, a failed call, generate
        to its end and broken off) and lets go of everything. After a garbage collection each object that came to be in
        between must be gone (models and their modules, sessions, steps, compiled functions, caches, parameters), and
        MLX's active memory must be what it was.

    Why:
        A server that changes models keeps each of them if a compile cache, a registry or an exception refers to it:
        gigabytes a time, without an error until nothing fits any more.

    Example:
        alive after the last reference to them went: CompiledDecodeSession, Model, LlamaModel, 4 TransformerBlock

    How to fix:
        Keep nothing in globals, class attributes or `functools.cache`; close over no session in a function that
        outlives it. `gc.get_referrers(model)` names who holds it.

    Sources:
        osaurus-ai/vmlx-swift#215 (a compile cache that kept whole models)
    """

    code = "LIF004"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        tokens = teacher_tokens(subject, 12, stream=20)  # makes the model that the checks share
        with no_spare_buffers():
            for last in (False, True):
                _forget_snapshot()
                start = active_memory()
                watched = _life(subject, tokens)
                _forget_snapshot()
                _require_gone(watched)
                # What a first use leaves behind for good (a table of the model's code) is no leak: use it again.
                growth = growth_since(start) if last else active_memory() - start
                if growth <= 0:
                    break
        if growth > 0:
            raise CheckFailed(
                f"{growth} bytes are still in use after the last reference to model and caches went, wanted 0"
            )
        return {"watched": len(watched), "growth_bytes": max(0, growth)}


def _life(subject: Subject, tokens: list[int]) -> list[weakref.ref[Any]]:
    """Use a model in every way and return weak references to all that it and its use brought into being."""
    before = _objects()
    known = {id(found) for found in before}
    model = subject.tiny_model(subject.dtype)
    session = session_for(subject, 24, model=model, prefill_step_size=3)
    session.prefill([tokens[:5]])
    session.step(tokens[5:6])
    copy = session.copy()
    session.extend([tokens[6:9]])
    copy.step(tokens[9:10])
    with failing(middle_layer(model)):
        must_fail(lambda: session.extend([tokens[10:]]), "extend")
    session.trim(1)
    text = list(session.generate(tokens[10:], max_new_tokens=3))
    stopped = copy.generate(tokens[10:], max_new_tokens=3)
    text.append(next(stopped))
    parameters = [slot.container[slot.key] for slot in parameter_slots(model)]
    made = [found for found in _objects() if id(found) not in known]
    return [weakref.ref(found) for found in (*made, *parameters)]


def _objects() -> list[Any]:
    """Return all live objects of the classes that are watched."""
    # Not `isinstance`: a proxy would import what it stands for.
    return [found for found in gc.get_objects() if issubclass(type(found), _WATCHED)]


def _require_gone(watched: list[weakref.ref[Any]]) -> None:
    """Require that nothing watched is left.

    Raises:
        CheckFailed: names the classes of what is left, and how many.
    """
    gc.collect()
    alive = [found for found in (reference() for reference in watched) if found is not None]
    if not alive:
        return
    alive.sort(key=lambda found: [not issubclass(type(found), cls) for cls in _WATCHED])
    counts = Counter(type(found).__name__ for found in alive)
    names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items())
    raise CheckFailed(f"alive after the last reference to them went: {names}", figures={"alive": len(alive)})


def _forget_snapshot() -> None:
    """Put another model in the place of the last snapshot's: an audit keeps that one, to look at it only once."""
    ModuleState(nn.Module())
