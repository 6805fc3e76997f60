"""What two runs may differ by."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_audit.checks.tolerance import largest_difference, tolerance_for

ONE = mx.array([1.0, -4.0])


def test_exact_means_equal_on_the_cpu() -> None:
    exact = tolerance_for("exact", "bfloat16", "cpu")
    assert (exact.relative, exact.name) == (0.0, "exact")
    assert exact.accepts(ONE, ONE)
    assert exact.accepts(mx.array([0.0]), mx.array([-0.0]))
    assert not exact.accepts(ONE, ONE + 1e-6)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_elsewhere_the_class_is_that_of_another_kernel(backend: str) -> None:
    assert tolerance_for("exact", "float32", backend) == tolerance_for("kernel", "float32", "cpu")


def test_a_looser_class_or_a_shorter_dtype_allows_more() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        exact, reordered, kernel = (
            tolerance_for(name, dtype, "cpu").relative for name in ("exact", "reordered", "kernel")
        )
        assert exact < reordered < kernel
    for name in ("reordered", "kernel"):
        single, half, brain = (
            tolerance_for(name, dtype, "cpu").relative for dtype in ("float32", "float16", "bfloat16")
        )
        assert single < half < brain


def test_the_bound_is_relative_to_the_largest_wanted_value() -> None:
    bound = tolerance_for("reordered", "float32", "cpu")
    assert bound.accepts(ONE + 3e-4, ONE)
    assert not bound.accepts(ONE + 5e-4, ONE)
    assert not bound.accepts(mx.array([1e-3]), mx.array([0.0]))


@pytest.mark.parametrize("bad", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("name", ["exact", "reordered", "kernel"])
def test_what_is_not_a_number_is_never_accepted(name: str, bad: float) -> None:
    bound = tolerance_for(name, "float32", "cpu")
    broken = mx.array([1.0, bad])
    assert not bound.accepts(broken, ONE)
    assert not bound.accepts(ONE, broken)
    assert not bound.accepts(broken, broken), "two wrong runs are no proof of each other"


def test_shapes_are_not_broadcast() -> None:
    assert largest_difference(mx.zeros((1, 2)), mx.zeros((2,))) == float("inf")
    assert largest_difference(mx.zeros((0,)), mx.zeros((0,))) == 0.0
