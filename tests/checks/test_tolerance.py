"""What two runs may differ by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from audited import green, red
from kind_models import kind_subject
from mlx_audit.checks.base import CheckFailed
from mlx_audit.checks.reference import error_against
from mlx_audit.checks.runs import Comparer
from mlx_audit.checks.tolerance import (
    POLICY,
    error_allowed,
    largest_difference,
    relative_difference,
    table,
    tolerance_for,
)
from mlx_audit.decode import CompiledDecodeSession as Session

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

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
    alike = broken if bad != -mx.inf else mx.array([bad, bad])
    assert not bound.accepts(alike, alike), "two wrong runs are no proof of each other"


@pytest.mark.parametrize("name", ["exact", "reordered", "kernel"])
def test_minus_infinity_in_both_marks_an_id_that_is_never_to_be_chosen(name: str) -> None:
    bound, hidden = tolerance_for(name, "float32", "cpu"), mx.array([-mx.inf])
    marked = mx.concatenate([ONE, hidden])
    assert bound.accepts(marked, marked)
    assert bound.allowed(marked) == bound.allowed(ONE)
    assert largest_difference(marked, marked) == 0.0
    assert relative_difference(mx.concatenate([ONE + 1, hidden]), marked) == 0.25
    assert error_against(marked, mx.concatenate([ONE + 1, hidden])) == 1 / 3
    assert not bound.accepts(mx.concatenate([ONE + 1, hidden]), marked)
    for other in (mx.array([0.0]), mx.array([mx.nan]), mx.array([mx.inf])):
        assert not bound.accepts(mx.concatenate([ONE, other]), marked)
        assert not bound.accepts(marked, mx.concatenate([ONE, other]))


def test_shapes_are_not_broadcast() -> None:
    assert largest_difference(mx.zeros((1, 2)), mx.zeros((2,))) == float("inf")
    assert largest_difference(mx.zeros((0,)), mx.zeros((0,))) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["reordered", "kernel"])
def test_another_most_likely_token_fails_within_the_bound_but_for_a_tie(name: str, dtype: str) -> None:
    bound = tolerance_for(name, dtype, "cpu")
    want = mx.array([[0.0, 1.0, 1.0 - 1.5 * bound.relative]])
    got = mx.array([[0.0, 1.0 - 0.9 * bound.relative, 1.0 - 0.7 * bound.relative]])
    assert largest_difference(got, want) < bound.relative
    assert str(bound.objection(got, want)).startswith("the most likely token is 2, wanted 1; logits[")
    tie = mx.array([[0.0, 1.0, 1.0 - 0.5 * bound.relative]])
    assert bound.accepts(got, tie)


def test_the_row_is_named() -> None:
    want = mx.array([[1.0, 0.0], [1.0, 0.0]])
    objection = tolerance_for("kernel", "float32", "cpu").objection(want, want[:, ::-1])
    assert str(objection).startswith("the most likely token of row 0 is 0, wanted 1")


def test_what_is_compared_first() -> None:
    bound, want = tolerance_for("reordered", "float32", "cpu"), mx.array([[1.0, 0.0, -4.0]])
    assert bound.objection(want[:, :2], want) == "shape (1, 2), wanted (1, 3)"
    assert bound.objection(want.astype(mx.float16), want) == "dtype float16, wanted float32"
    assert bound.objection(mx.array([[0.0, 1.0, mx.nan]]), want) == "logits[2] is nan, wanted -4"
    other = mx.array([[0.0, 0.5, 9.0]])
    assert bound.objection(other, want) == "the most likely token is 2, wanted 0; logits[2] is 9, wanted -4"
    assert bound.objection(want + 0.01, want) is not None
    assert bound.objection(want + 1e-4, want) is None
    assert bound.accepts(mx.array([1.0, 1.0 - 1e-5]), mx.array([1.0 - 1e-5, 1.0])), "no logits, no token"


def test_the_failure_says_what_was_needed_and_what_is_allowed() -> None:
    comparer = Comparer(tolerance_for("reordered", "float32", "cpu"))
    with pytest.raises(
        CheckFailed, match=r"at step 1: the most likely token is 1, wanted 0; logits\[1\] is 2"
    ) as failed:
        comparer.check(mx.array([[1.0, 2.0]]), mx.array([[1.0, 0.0]]), "step 1")
    assert failed.value.reason.endswith("largest difference 2, allowed 0.0001 (reordered)")
    assert failed.value.figures["minimum_tolerance"] == 2.0


def test_the_error_against_float64_is_measured_by_eagers_own() -> None:
    assert error_allowed("exact", 2e-6) == 2e-6
    assert error_allowed("reordered", 2e-6) == pytest.approx(1.6e-5)
    assert error_allowed("kernel", 2e-6) == pytest.approx(1.2e-4)


def _off(patch: pytest.MonkeyPatch, dtype: str, share: float) -> None:
    """Plant a step whose least likely token is off by a share of the bound, in one dtype."""
    own, relative = Session.step, POLICY["reordered"].relative[dtype]

    def step(self: Session, tokens: Any) -> mx.array:
        logits = own(self, tokens)
        if logits.dtype != DTYPES[dtype]:
            return logits
        least = mx.arange(logits.shape[-1]) == mx.argmin(logits, axis=-1, keepdims=True)
        return mx.where(least, logits - share * relative * mx.max(mx.abs(logits)), logits)

    patch.setattr(Session, "step", step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_beyond_the_bound_of_its_dtype_is_red(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _off(monkeypatch, dtype, 2.0)
    result = red("PAR001", replace(kind_subject("rotating"), dtype=dtype))
    assert f"logits differ at step 1 after a prompt of 13, {dtype}: logits[" in result.reason
    assert 1.9 < result.figures["minimum_tolerance"] / POLICY["reordered"].relative[dtype] < 2.2


def test_a_fault_within_the_bound_is_red_where_it_is_far_from_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _off(monkeypatch, "float32", 0.5)
    result = red("PAR001", kind_subject("rotating"))
    assert "compiled float32 is off by" in result.reason
    assert "(reordered)" in result.reason
    assert result.where == "the error against float64"


def test_what_the_bound_of_a_short_dtype_is_for_is_green(monkeypatch: pytest.MonkeyPatch) -> None:
    _off(monkeypatch, "bfloat16", 0.5)
    figures = green("PAR001", kind_subject("rotating")).figures
    assert 0.4 < figures["bfloat16"]["minimum_tolerance"] / POLICY["reordered"].relative["bfloat16"] < 0.6
    assert figures["float64"]["compiled_error"] < figures["float64"]["allowed_error"]


def test_the_page_shows_the_table_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs/tolerances.md"
    assert table() in page.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in table() for name in POLICY)
