"""CountedCompile: how often a function was traced, and which argument forced it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.decode import CountedCompile


def test_a_python_int_costs_a_trace_at_every_value_and_is_named() -> None:
    step = CountedCompile(lambda x, pos: x + pos)
    x = mx.zeros((2, 512))
    for pos in range(300):
        step(x, pos)
    assert step.trace_count == 300
    assert len(step.reasons) == 299
    assert step.reasons[0] == "retraced because of pos: int 0 → int 1"
    assert all("because of pos: int" in reason for reason in step.reasons)


def test_an_array_position_costs_one_trace() -> None:
    step = CountedCompile(lambda x, pos: x + pos)
    x = mx.zeros((2, 512))
    for pos in range(300):
        last = step(x, mx.array([pos]))
    assert (step.trace_count, step.reasons) == (1, [])
    assert last[0, 0].item() == 299


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (mx.zeros(2), mx.zeros(3), "x: float32[2] → float32[3]"),
        (mx.zeros(2), mx.zeros(2, mx.float16), "x: float32[2] → float16[2]"),
        ([mx.zeros(2)], [mx.zeros(2), mx.zeros(1)], "x[1]: absent → float32[1]"),
        ({"a": mx.zeros(2)}, {"b": mx.zeros(2)}, "x['a']: float32[2] → absent, x['b']: absent → float32[2]"),
        ([{"k": (mx.zeros(2), 1)}], [{"k": (mx.zeros(2), 2)}], "x[0]['k'][1]: int 1 → int 2"),
    ],
    ids=["shape", "dtype", "length", "key", "nested"],
)
def test_reasons_name_the_leaf(first: Any, second: Any, reason: str) -> None:
    def total(x: Any) -> mx.array:
        leaves = [x] if isinstance(x, mx.array) else []
        if isinstance(x, list | tuple | dict):
            leaves = [
                total(item)
                for item in (x.values() if isinstance(x, dict) else x)
                if not isinstance(item, int)
            ]
        return sum((leaf.sum() for leaf in leaves), mx.array(0.0))

    step = CountedCompile(total)
    step(first)
    step(first)
    step(second)
    assert (step.trace_count, step.reasons) == (2, [f"retraced because of {reason}"])


def test_switched_off_compilation_shows() -> None:
    step = CountedCompile(lambda x: x + 1)
    mx.disable_compile()
    try:
        for _ in range(3):
            step(mx.zeros(2))
    finally:
        mx.enable_compile()
    assert step.trace_count == 3
    assert (
        step.reasons
        == ["retraced with equal arguments: mx.compile is switched off, or no C++ compiler was found"] * 2
    )


def test_a_failed_trace_is_not_counted_and_the_next_one_works() -> None:
    fail = [True]

    def body(x: mx.array) -> mx.array:
        if fail:
            fail.pop()
            raise ValueError("planted")
        return x + 1

    step = CountedCompile(body)
    with pytest.raises(ValueError, match="planted"):
        step(mx.zeros(2))
    assert step.trace_count == 0
    assert step(mx.zeros(2)).tolist() == [1, 1]
    assert (step.trace_count, step.reasons) == (1, [])


def test_two_of_one_function_count_apart_and_outlive_each_other() -> None:
    def body(x: mx.array) -> mx.array:
        return x + 1

    first, second = CountedCompile(body), CountedCompile(body)
    first(mx.zeros(2)), second(mx.zeros(2)), second(mx.zeros(3))
    assert (first.trace_count, second.trace_count) == (1, 2)
    del first
    gc.collect()
    second(mx.zeros(2))
    assert second.trace_count == 2


def test_what_the_function_holds_is_freed_with_it() -> None:
    class Holder:
        weight = mx.zeros(4)

        def __call__(self, x: mx.array) -> mx.array:
            return x + self.weight

    holder = Holder()
    step, gone = CountedCompile(holder), weakref.ref(holder)
    step(mx.zeros(4))
    del holder, step
    gc.collect()
    assert gone() is None
