"""ModuleState: everything that a forward may leave on a module is seen, and undone exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_audit.adapters import ModuleState, parameter_slots
from tiny_models import shared_model


class Plain:
    """An object that is no module."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class CallablePlain(Plain):
    """An object that is called like a layer, as mlx-lm's RoPE helpers could be."""

    def __call__(self, x: mx.array) -> mx.array:
        return x


class Subject(nn.Module):
    """A module that keeps something of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        self.table = {"a": mx.zeros(1), "deep": {"list": [mx.zeros(1), 1]}}
        self.pair = (Plain(seen=0), [1, 2, 3])
        self.plain = Plain(count=0, inner=Plain(mask=None), rows=[])
        self.empty = Plain()
        self.rope = CallablePlain(offset=0)
        self.history: list[Any] = ["a", "b", "c", "d"]
        self.steps = 0
        self.ratio = 0.5
        self.mask = None
        self._hidden = mx.zeros(1)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(self.rope(x))
        return x * self.ratio + self.table["a"]


def _set(name: str, value: Any) -> Callable[[Subject], None]:
    return lambda subject: setattr(subject, name, value)


WRITES: dict[str, tuple[str, bool, Callable[[Subject], Any]]] = {
    # name: (path of the change, whether arrays are concerned, the write)
    "public array added": ("memo", True, _set("memo", mx.zeros(3))),
    "private array replaced": ("_hidden", True, _set("_hidden", mx.zeros(2))),
    "None becomes an array": ("mask", True, _set("mask", mx.zeros(2))),
    "array deleted": ("_hidden", True, lambda m: delattr(m, "_hidden")),
    "Python int counted up": ("steps", False, lambda m: setattr(m, "steps", m.steps + 1)),
    "Python float": ("ratio", False, _set("ratio", 0.25)),
    "toggle": ("flag", False, _set("flag", True)),
    "weight of a layer": ("layers.1.weight", True, lambda m: setattr(m.layers[1], "weight", mx.ones((2, 2)))),
    "layer replaced": ("layers.0", True, lambda m: m.layers.__setitem__(0, nn.Linear(2, 2))),
    "layer appended": ("layers.2", True, lambda m: m.layers.append(nn.Linear(2, 2))),
    "key in a dict": ("table.b", True, lambda m: m.table.__setitem__("b", mx.zeros(1))),
    "key taken from a dict": ("table.a", True, lambda m: m.table.pop("a")),
    "deep list": ("table.deep.list.1", False, lambda m: m.table["deep"]["list"].__setitem__(1, 2)),
    "list append": ("history.4", False, lambda m: m.history.append("e")),
    "list append of an array": ("history.4", True, lambda m: m.history.append(mx.zeros(1))),
    "list cleared": ("history.0", False, lambda m: m.history.clear()),
    "list shortened": ("history.2", False, lambda m: m.history.__delitem__(slice(2, None))),
    "list turned over": ("history.0", False, lambda m: m.history.reverse()),
    "list in a tuple": ("pair.1.3", False, lambda m: m.pair[1].append(4)),
    "object in a tuple": ("pair.0.seen", False, lambda m: setattr(m.pair[0], "seen", 1)),
    "plain object's int": ("plain.count", False, lambda m: setattr(m.plain, "count", 1)),
    "plain object's list": ("plain.rows.0", True, lambda m: m.plain.rows.append(mx.zeros(1))),
    "object in an object": ("plain.inner.mask", True, lambda m: setattr(m.plain.inner, "mask", mx.zeros(1))),
    "new attribute of an empty object": ("empty.mask", True, lambda m: setattr(m.empty, "mask", mx.zeros(1))),
    "callable object": ("rope.offset", False, lambda m: setattr(m.rope, "offset", 3)),
    "array in a container of a new attribute": ("memo", True, _set("memo", {"by": [mx.zeros(1)]})),
    "object that holds an array": ("memo", True, _set("memo", Plain(mask=mx.zeros(1)))),
}


def picture(value: Any, depth: int = 8) -> Any:
    """Return everything below a value as plain data; arrays and layers by identity."""
    if isinstance(value, mx.array):
        return ("array", id(value))
    if depth == 0 or isinstance(value, int | float | str | None):
        return repr(value)
    parts: list[Any] = [type(value).__name__]
    if isinstance(value, dict):
        parts.append({key: picture(item, depth - 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        parts.append([picture(item, depth - 1) for item in value])
    if hasattr(value, "__dict__"):
        parts.append({key: picture(item, depth - 1) for key, item in vars(value).items()})
    return parts


@pytest.mark.parametrize("name", WRITES)
def test_write_is_named_and_undone(name: str) -> None:
    path, concerns_arrays, write = WRITES[name]
    subject = Subject()
    before, state = picture(subject), ModuleState(subject)
    write(subject)
    changes = state.changes()
    assert path in [change.path for change in changes]
    assert next(change for change in changes if change.path == path).concerns_arrays is concerns_arrays
    state.restore()
    assert picture(subject) == before
    assert state.changes() == []


def test_all_writes_together_are_undone() -> None:
    subject = Subject()
    before, state = picture(subject), ModuleState(subject)
    for name, (_, _, write) in WRITES.items():
        if "deleted" not in name and "layer" not in name:
            write(subject)
    state.restore()
    assert picture(subject) == before


def test_undo_of_some_changes_leaves_the_others() -> None:
    subject = Subject()
    state = ModuleState(subject)
    subject.steps, subject.mask = 7, mx.zeros(1)
    state.undo(state.array_changes())
    assert (subject.steps, subject.mask) == (7, None)


@pytest.mark.parametrize(
    "values", [(0.1 + 0.2, float("3e-1") + 5.551115123125783e-17), ("ab" * 9, "".join(["ab"] * 9))]
)
def test_an_equal_python_value_is_no_change(values: tuple[Any, Any]) -> None:
    subject = Subject()
    subject.value = values[0]
    state = ModuleState(subject)
    subject.value = values[1]
    assert state.changes() == []


def test_equal_values_of_different_type_are_a_change() -> None:
    subject = Subject()
    state = ModuleState(subject)
    subject.steps = False  # 0 == False, but a graph may differ
    assert [change.path for change in state.changes()] == ["steps"]


def test_a_pure_forward_changes_nothing() -> None:
    subject = Subject()
    state = ModuleState(subject)
    mx.eval(subject(mx.zeros((1, 2))))
    assert state.changes() == []
    for family in ("llama", "qwen2"):
        model = shared_model(family)
        state = ModuleState(model)
        mx.eval(model(mx.zeros((1, 3), mx.int32)))
        assert state.changes() == []


@pytest.mark.parametrize("shape", [(), (1,), (1, 2), (2, 1), (1, 1, 3)])
def test_rewinding_adds_nothing_to_a_graph(shape: tuple[int, ...]) -> None:
    module = nn.Module()
    module.kept = mx.zeros(shape) + 1
    before = _primitives(module.kept)
    ModuleState(module).rewind()
    assert _primitives(module.kept) == before


def _primitives(array: mx.array) -> list[str]:
    events: list[Any] = []
    mx.export_function(events.append, lambda: [array])
    return [event["name"] for event in events if event["type"] == "primitive"]


def test_cycles_end() -> None:
    subject = Subject()
    subject.plain.owner = subject
    subject.history.append(subject.history)
    state = ModuleState(subject)
    subject.plain.count = 5
    assert [change.path for change in state.changes()] == ["plain.count"]


def test_slots_are_mlx_own_parameters() -> None:
    subject = Subject()
    for module in (subject, shared_model("llama"), shared_model("qwen2")):
        from mlx.utils import tree_flatten

        wanted = {path: id(array) for path, array in tree_flatten(module.parameters())}
        assert {path: id(container[key]) for path, container, key in parameter_slots(module)} == wanted


def test_slots_come_in_an_order_that_assignments_do_not_change() -> None:
    subject = Subject()
    before = [slot.path for slot in parameter_slots(subject)]
    weight = subject.layers[0].weight
    del subject.layers[0].weight  # and back again: a dict keeps it at its end now
    subject.layers[0].weight = weight
    assert [slot.path for slot in parameter_slots(subject)] == before
