"""Operations written out anew, for dtypes that MLX lacks."""

from __future__ import annotations

import mlx.core as mx
import pytest

from audited import green, new_subject, red
from mlx_audit.checks import stand_ins
from mlx_audit.checks.stand_ins import gather_and_matmul, refuses_gather_mm, stand_ins_for, swapped
from mlx_audit.faults import FAULTS
from tiny_models import config_of, distance

MIXTURE = config_of("mixtral", num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2)


@pytest.mark.parametrize("sides", [("lhs_indices",), ("rhs_indices",), ("lhs_indices", "rhs_indices")])
def test_it_gives_what_gather_mm_gives(sides: tuple[str, ...]) -> None:
    mx.random.seed(0)
    a, b = mx.random.normal((3, 5, 4)), mx.random.normal((3, 4, 6))
    chosen = {side: mx.array([2, 0, 2]) for side in sides}
    wanted = mx.gather_mm(a, b, **chosen)
    assert distance(gather_and_matmul(a, b, **chosen), wanted) < 1e-6


def test_it_broadcasts_indices_as_the_layers_of_experts_do() -> None:
    mx.random.seed(0)
    a, b = mx.random.normal((1, 7, 1, 1, 4)), mx.random.normal((3, 4, 6))
    experts = mx.array([[[0, 2]] * 7])
    wanted = mx.gather_mm(a, b, rhs_indices=experts)
    got = gather_and_matmul(a, b, rhs_indices=experts)
    assert distance(got, wanted) < 1e-6


def test_float32_is_never_replaced() -> None:
    assert not refuses_gather_mm("float32")
    own = mx.gather_mm
    with stand_ins_for("float32") as used:
        assert mx.gather_mm is own
    assert not used


def test_what_was_swapped_comes_back_after_an_error() -> None:
    own = mx.gather_mm
    with pytest.raises(ValueError, match="inside"), swapped((mx, "gather_mm", None)):
        raise ValueError("inside")
    assert mx.gather_mm is own


def test_experts_run_in_half_precision_and_the_stand_in_is_named() -> None:
    figures = green("PAR001", new_subject("mixtral", config=MIXTURE, profile="ci")).figures
    for dtype in ("bfloat16", "float16"):
        assert figures[dtype]["compared"] == 25, "the prompt and 24 steps"
        named = figures[dtype].get("stand_in")
        assert named == (stand_ins.GATHER_MM if refuses_gather_mm(dtype) else None)
    assert "stand_in" not in figures["float32"]
    assert figures["float64"]["ratio"] == pytest.approx(1.0)


def test_a_fault_is_red_behind_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["cache_read_in_float32"](monkeypatch)
    assert (
        red("PAR001", new_subject("mixtral", config=MIXTURE)).where == "step 1 after a prompt of 13, bfloat16"
    )
