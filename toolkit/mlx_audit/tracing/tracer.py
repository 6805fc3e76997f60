"""Hands out the traced step as data, without evaluating anything: any size of model traces in its structure's time."""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import mlx_audit
from mlx_audit.adapters import FixedCapacityKVCacheProviding, parameter_slots
from mlx_audit.decode import DecodeStep, State, attention_cuda
from mlx_audit.decode.state import require_count
from mlx_audit.errors import MlxAuditError
from mlx_audit.tracing.constants import dtype_name, read_constant
from mlx_audit.tracing.graph import Graph, Leaf, Node, Value
from mlx_audit.tracing.host_reads import watched
from mlx_audit.tracing.layout import axes_of, largest_ring, leaves_of, prime_from
from mlx_audit.tracing.paths import short_path
from mlx_audit.tracing.rewrites import Bounds

PRIME_CAPACITY = 4099
"""A capacity that is prime, so that no other axis of a model is taken for it; larger where a ring is."""

PRIME_RUNG = 2053
"""A rung that is prime too, and below the capacity, so that both axes show in the graph."""

_BEYOND_RING = 64
"""Tokens that still fit after the largest ring has turned."""

Event = dict[str, Any]


class TraceFailed(MlxAuditError):
    """The forward raised while it was traced: it reads a value that a compiled graph doesn't have."""

    exit_code = 1


class ExportRefused(MlxAuditError):
    """MLX could not hand out the graph; this says nothing about the model."""

    exit_code = 4


class StepTracer:
    """Traces one model's decode step after a history of prefill chunks.

    Args:
        model: An mlx-lm model; parameters may be lazy and stay so.
        provider: Makes its fixed-capacity caches.
        capacity: Tokens; by default a prime, with room for every ring of the model to turn.
        rung: Slots that the step attends over; by default another prime, and more than every ring has.
        batch_size: Rows.
    """

    def __init__(
        self,
        model: nn.Module,
        provider: FixedCapacityKVCacheProviding,
        *,
        capacity: int | None = None,
        rung: int | None = None,
        batch_size: int = 1,
    ) -> None:
        self.model = model
        self.provider = provider
        self.host_reads: list[str] = []
        """Reads of a traced value that the last trace's forward tried, as `file:line: read`."""
        self.ring = largest_ring(model)
        """Slots of the largest ring of the model's own caches; 0 without one."""
        taken = axes_of(model)
        rung = rung or prime_from(max(PRIME_RUNG, self.ring + _BEYOND_RING), taken)
        self._rewritten: list[str] = []
        self.capacity = capacity or prime_from(max(PRIME_CAPACITY, 2 * rung - 2 * _BEYOND_RING), taken)
        self.batch_size = batch_size
        self.rung = min(rung, self.capacity)
        caches = provider.new_fixed_capacity_cache(self.capacity, batch_size=batch_size)
        self.step = DecodeStep(model, caches).at_rung(self.rung)
        self.leaves = [
            leaf
            for index, cache in enumerate(self.step.caches)
            for leaf in leaves_of(cache, f"caches[{index}]")
        ]

    def state_after(self, chunks: Sequence[int]) -> State:
        """Return the adopted state after a lazy native prefill in chunks of the given lengths."""
        native = make_prompt_cache(self.model)
        with _named_failures():
            for length in chunks:
                self.model(mx.zeros((self.batch_size, length), mx.int32), cache=native)
        caches = [cache.refilled(own) for cache, own in zip(self.step.caches, native, strict=True)]
        require_count(caches, sum(chunks))
        return [cache.state for cache in caches]

    def events(self, state: State, receive: Callable[[Event], None]) -> None:
        """Trace the step once and hand each event of MLX's exporter to `receive`.

        Raises:
            TraceFailed: the forward raised; `where` is the line.
            ExportRefused: MLX's exporter raised; `found` is its message, with the primitive's name.
        """
        parameters = self.step.parameters()
        count = len(parameters)
        sizes = [len(arrays) for arrays in state]
        inside: list[BaseException] = []

        def flat(*arrays: mx.array) -> list[mx.array]:
            rest = list(arrays[count:-1])
            rows = [[rest.pop(0) for _ in range(size)] for size in sizes]
            try:
                with _named_failures():
                    logits, new = self.step(list(arrays[:count]), rows, arrays[-1])
            except BaseException as error:
                inside.append(error)
                raise
            # The parameters come last, so that one written in place shows: it no longer is the input that it was. So
            # do those that take another's place, to show what they are made of.
            self._rewritten = list(self.step.rewritten)
            state_leaves = [array for leaves in new for array in leaves]
            return [logits, *state_leaves, *arrays[:count], *self.step.rewritten.values()]

        leaves = [array for arrays in state for array in arrays]
        try:
            self.host_reads.clear()
            with _exportable(), watched(self.host_reads), attention_cuda.unsplit():
                mx.export_function(
                    receive, flat, *parameters, *leaves, mx.zeros((self.batch_size,), mx.int32)
                )
        except Exception as error:
            if inside:
                raise inside[0] from None
            if "uncaptured inputs" in str(error):
                raise TraceFailed(
                    "the step reads an array that an earlier call made, and that is kept outside the caches",
                    where=short_path(Path(inspect.getfile(type(self.model)))),
                    found="a placeholder of another trace, or an array computed from the weights before",
                    fix="keep no array in globals, closures or attributes during a forward",
                ) from error
            raise ExportRefused("MLX's exporter refused the graph", found=error) from error

    def written_in_place(self, events: Sequence[Event]) -> list[str]:
        """Return the parameters that the traced step changed in place."""
        paths, before, after = self._parameters_in(events)
        return [path for path, old, new in zip(paths, before, after, strict=False) if old != new]

    def written_outside(self, events: Sequence[Event]) -> list[str]:
        """Return what the traced step wrote outside the caches, but weights that it only holds within bounds."""
        paths, before, after = self._parameters_in(events)
        old = dict(zip(paths, before, strict=True))
        made = dict(zip(self._rewritten, after[len(paths) :], strict=True))
        bounds = Bounds(events) if made else None
        held = {path for path, new in made.items() if bounds and path in old and bounds.hold(new, old[path])}
        return [path for path in self.step.written if path not in held]

    def _parameters_in(self, events: Sequence[Event]) -> tuple[list[str], list[str], list[str]]:
        """Return the parameters' paths, and the names of their values before and after the step."""
        paths = [slot.path for slot in parameter_slots(self.model)]
        by_type = {event["type"]: event for event in events if event["type"] in ("inputs", "outputs")}
        before = [item[0] for item in by_type["inputs"]["inputs"][: len(paths)]]
        return paths, before, [item[0] for item in by_type["outputs"]["outputs"][1 + len(self.leaves) :]]

    def graph(self, events: Sequence[Event]) -> Graph:
        """Return the graph that a complete list of events describes."""
        paths = [slot.path for slot in parameter_slots(self.model)]
        state = [leaf.path for leaf in self.leaves]
        return build_graph(events, [*paths, *state, "tokens"], len(paths), self.leaves)


def build_graph(
    events: Sequence[Event], paths: Sequence[str], parameter_count: int, leaves: Sequence[Leaf]
) -> Graph:
    """Return the graph described by the events of `mx.export_function`."""
    by_type: dict[str, Event] = {event["type"]: event for event in events if event["type"] != "primitive"}
    inputs = [_value(item, path) for item, path in zip(by_type["inputs"]["inputs"], paths, strict=True)]
    known = {value.name: value for value in inputs}

    def values(items: Sequence[Any]) -> tuple[Value, ...]:
        # A value is made once and then found by its name: a large graph mentions each one several times.
        return tuple([known.get(item[0]) or known.setdefault(item[0], _value(item)) for item in items])

    return Graph(
        inputs=inputs,
        outputs=[
            known.get(item[0]) or _value(item) for item in by_type["outputs"]["outputs"][: 1 + len(leaves)]
        ],
        constants=dict(by_type["constants"]["constants"]),
        nodes=[
            Node(event["name"], tuple(event["arguments"]), values(event["inputs"]), values(event["outputs"]))
            for event in events
            if event["type"] == "primitive"
        ],
        parameter_count=parameter_count,
        leaves=list(leaves),
    )


def changed_in_place(kept: Sequence[tuple[str, mx.array, mx.array]]) -> list[str]:
    """Return the paths of arrays that are no longer what their second handle is; evaluates nothing.

    Python cannot ask whether two handles share one array, but the exporter gives a shared one a single name.
    """
    if not kept:
        return []
    events: list[Event] = []
    arrays = [array for _, array, _ in kept] + [old for _, _, old in kept]
    try:
        with _exportable():
            mx.export_function(events.append, lambda: arrays)
    except Exception as error:
        raise ExportRefused("MLX's exporter refused the parameters", found=error) from error
    names = [item[0] for event in events if event["type"] == "outputs" for item in event["outputs"]]
    return [
        path for (path, _, _), new, old in zip(kept, names, names[len(kept) :], strict=False) if new != old
    ]


def bounded(pairs: Sequence[tuple[Any, Any]]) -> list[bool]:
    """Return for each pair of an array and what took its place whether this is the first within bounds.

    Evaluates nothing.
    """
    arrays = [array for pair in pairs for array in pair]
    if not arrays or not all(isinstance(array, mx.array) for array in arrays):
        return [False] * len(pairs)
    events: list[Event] = []
    with _exportable():
        mx.export_function(events.append, lambda: arrays)
    names = [item[0] for event in events if event["type"] == "outputs" for item in event["outputs"]]
    bounds = Bounds(events)
    return [bounds.hold(new, old) for old, new in zip(names[::2], names[1::2], strict=True)]


def readable(event: Event) -> Event:
    """Return an event whose constants can be compared and kept; a kernel's source becomes its digest."""
    if event.get("name") == "CustomKernel":
        name, source, *rest = event["arguments"]
        return {**event, "arguments": [name, hashlib.sha256(source.encode()).hexdigest()[:16], *rest]}
    if event["type"] != "constants":
        return event
    return {**event, "constants": [(name, read_constant(array)) for name, array in event["constants"]]}


def source_line(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame outside mlx-audit and MLX."""
    own, framework = Path(mlx_audit.__file__).parent, Path(nn.__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_relative_to(own) and not path.is_relative_to(framework):
            return f"{short_path(path)}:{frame.lineno}"
    return None


def _value(item: tuple[str, tuple[int, ...], mx.Dtype], path: str = "") -> Value:
    name, shape, dtype = item
    return Value(name, tuple(shape), dtype_name(dtype), path)


def _without_signatures(message: str) -> str:
    """Return the message of a refused call without all the signatures that MLX's bindings go on to list."""
    head, refused, _ = message.partition("incompatible function arguments.")
    return head + refused if refused else message


@contextmanager
def _named_failures() -> Iterator[None]:
    """Turn an exception of the model's code into one that names the line."""
    try:
        yield
    except MlxAuditError:
        raise
    except Exception as error:
        raise TraceFailed(
            "the forward reads a value on the host, or cannot run on arrays of fixed capacity",
            where=source_line(error),
            found=f"{type(error).__name__}: {_without_signatures(str(error))}",
            fix="keep the position an array: no int(), .item() or branch on it, and "
            "mx.arange(L) + mx.array(offset)[..., None] for a range",
        ) from error


_EXPORTABLE: dict[str, Callable[..., mx.array]] = {
    "contiguous": lambda array, *_, **__: array,
    "to_fp8": lambda array, **_: array.astype(mx.uint8),
    "from_fp8": lambda array, dtype=mx.bfloat16, **_: array.astype(dtype),
}
"""What stands in for functions whose primitives MLX's exporter refuses."""


@contextmanager
def _exportable() -> Iterator[None]:
    """Make graphs exportable: no primitive that the exporter lacks and no nested compiled ones, no garbage collection.

    Nothing is evaluated, so a cast, which makes of each number another one too, stands for a conversion to fp8.
    """
    own = {name: getattr(mx, name) for name in _EXPORTABLE}
    collecting, compiling = gc.isenabled(), compile_is_on()
    for name, stand_in in _EXPORTABLE.items():
        setattr(mx, name, stand_in)
    gc.disable()
    if compiling:
        mx.disable_compile()
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(mx, name, function)
        if compiling:
            mx.enable_compile()
        if collecting:
            gc.enable()


def compile_is_on() -> bool:
    """Return whether `mx.compile` traces once instead of running Python at every call; evaluates nothing."""
    calls = 0

    def probe(array: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return array + 1

    compiled = mx.compile(probe)
    compiled(mx.array(0))
    compiled(mx.array(0))
    return calls == 1


def compile_switched_off() -> bool:
    """Return whether the environment switches compilation off; MLX looks only at the variable's presence."""
    return "MLX_DISABLE_COMPILE" in os.environ
