"""`mlx-audit bench`: what it writes, and that a session's steps neither copy their buffers nor need more than these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from command import mlx_audit
from mlx_audit.audit.bench import Bench, Sizes, eager_tokens, measure
from mlx_audit.audit.bench_models import bench_model
from mlx_audit.audit.ratios import geometric_mean
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import MlxAuditError
from real_checkpoints import write_gguf
from tiny_models import Eager, tiny_model, tokens

pytestmark = pytest.mark.xdist_group("bench")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    done = mlx_audit(
        "bench", "tiny", "--fill", "8,300", "--capacity", "256,1024", "--blocks", "3", "--block-tokens", "3",
        "--generate", "300", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_fill_is_measured_at_each_capacity_that_holds_it(result: dict[str, Any]) -> None:
    cells = [(cell["capacity"], cell["fill"], cell["rung"]) for cell in result["cells"]]
    assert cells == [(256, 8, 256), (1024, 8, 256), (1024, 300, 512)]
    assert result["skipped"] == ["300 of 256: no room for a block of 3 tokens"]
    assert result["schema"] == "mlx-audit/bench/1"
    assert result["environment"]["backend"]
    assert (result["blocks"], result["block_tokens"], result["dtype"]) == (3, 3, "float32")


def test_ratios_are_paired_and_their_mean_lies_in_its_interval(result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        assert len(cell["ratios"]) == len(cell["cpu_ratios"]) == 3
        assert cell["same_tokens"]
        assert cell["traces"] == 1
        assert cell["trace_seconds"] > 0
        assert cell["eager_ms"] > 0
        mean = math.exp(sum(map(math.log, cell["ratios"])) / 3)
        assert cell["ratio"]["mean"] == pytest.approx(mean, rel=1e-3)
    for found in (
        *(cell[name] for cell in result["cells"] for name in ("ratio", "cpu_ratio")),
        result["geometric_mean"],
        result["cpu_geometric_mean"],
    ):
        assert 0 < found["low"] <= found["mean"] <= found["high"]


def test_a_whole_generation_counts_its_traces(result: dict[str, Any]) -> None:
    whole = result["generation"]
    assert (whole["tokens"], whole["traces"], whole["same_tokens"]) == (300, 2, True)
    assert whole["ratio"] == pytest.approx(whole["eager_seconds"] / whole["compiled_seconds"], rel=0.01)


def test_a_dispatch_bound_model_is_faster_compiled(result: dict[str, Any]) -> None:
    """The bar is 1.4 on a quiet machine; this asserts less, because a test run is not one."""
    assert result["geometric_mean"]["mean"] > 1.05


def test_peak_memory_is_at_most_the_buffers_above_eager() -> None:
    model = bench_model("tiny", None, dtype="float32", seed=0)
    sizes = Sizes(fills=(8,), capacities=(8192,), blocks=2, tokens=2)
    (memory,) = measure(model, sizes, lambda _: None)["memory"]
    assert (memory["capacity"], memory["fill"]) == (8192, 64)
    assert memory["buffer_bytes"] == pytest.approx(2 * 32 * 2 * 8192 * 16 * 4, rel=1e-4)
    assert memory["compiled_peak_bytes"] <= memory["eager_peak_bytes"] + memory["buffer_bytes"]


def test_steps_write_into_their_buffers() -> None:
    model = tiny_model()
    session = CompiledDecodeSession(model, 32768, evidence="ignore")
    session.prefill([tokens(8)])
    session.step([1])
    buffers = sum(array.nbytes for arrays in session.state for array in arrays)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for token in tokens(8, seed=2):
        session.step([token])
    # One copy of one layer's keys would be an eighth of the buffers.
    assert mx.get_peak_memory() - before < buffers / 16


def running_ahead() -> tuple[Bench, int]:
    """Return a session of 64 buffers that was traced, and the bytes of half a buffer."""
    session = Bench(bench_model("tiny", None, dtype="float32", seed=0), 32768, evidence="ignore")
    session.prefill([tokens(8)])
    session.after(1, 2)
    return session, sum(array.nbytes for arrays in session.state for array in arrays) // 128


def further_bytes(session: Bench, steps: int) -> int:
    """Return the bytes that steps which run ahead need at their peak, beyond what the session holds."""
    mx.eval(session.state)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    session.after(2, steps)
    return mx.get_peak_memory() - before


def test_a_step_that_runs_ahead_writes_into_the_buffers() -> None:
    """One at a time, so that nothing but the session itself could hold a buffer back."""
    session, half_a_buffer = running_ahead()
    for _ in range(8):
        assert further_bytes(session, 1) < half_a_buffer


def test_steps_that_run_ahead_of_one_another_write_into_the_buffers() -> None:
    """On a busy machine MLX may copy one buffer that a step under way holds still; it does not at every run."""
    session, half_a_buffer = running_ahead()
    assert any(further_bytes(session, 8) < half_a_buffer for _ in range(20))


def test_both_loops_are_those_of_the_model() -> None:
    model, ids = tiny_model(), tokens(9)
    eager = Eager(model)
    token = int(mx.argmax(eager.feed([ids]), axis=-1).item())
    wanted = [token]
    for _ in range(6):
        wanted.append(int(mx.argmax(eager.feed([wanted[-1:]]), axis=-1).item()))
    native = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=native))
    session = Bench(model, 32, evidence="ignore")
    session.adopt(native, len(ids))
    assert eager_tokens(model, native, token, 6) == wanted[1:]
    assert session.after(token, 6) == wanted[1:]
    assert session.trace_count == 1, "every token takes the compiled step"
    assert session.position == native[0].offset == len(ids) + 6


def test_blocks_leave_the_caches_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    own = Bench.after

    def noted(session: Bench, token: int, count: int) -> list[int]:
        seen.append((session.position, count))
        return own(session, token, count)

    monkeypatch.setattr(Bench, "after", noted)
    measure(tiny_model(), Sizes(fills=(10,), capacities=(64,), blocks=3, tokens=2), lambda _: None)
    assert seen[:4] == [(10, 2)] * 4


def test_a_mean_of_ratios() -> None:
    found = geometric_mean([[2.0, 0.5], [4.0, 4.0]])
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(math.sqrt(2.0))
    assert found.high == pytest.approx(math.sqrt(8.0))
    assert geometric_mean([[1.1]] * 3) == pytest.approx((1.1, 1.1, 1.1))


def test_a_checkpoint_is_measured_with_its_own_weights(tmp_path: Path) -> None:
    done = mlx_audit(
        "bench", write_gguf(tmp_path / "x.gguf"), "--fill", "8", "--capacity", "32", "--blocks", "2"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("capacity   fill   rung   eager/compiled")
    assert lines[1].split()[:3] == ["32", "8", "32"]
    assert lines[1].endswith("same")
    assert lines[2].startswith("geometric mean ")
    assert lines[3].startswith("of processor time ")
    assert lines[4].startswith("peak memory, 32 declared and 24 used: compiled ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "docs/measured/cpu.json"), "nothing says where to draw"),
        (("nowhere",), "no such target"),
        (("qwen2",), "a family needs a configuration"),
        (("tiny", "--fill", "x"), "whole numbers are needed"),
        (("tiny", "--capacity", "0"), "whole numbers are needed"),
        (("tiny", "--fill", "64", "--capacity", "64"), "nothing can be measured"),
        (("tiny", "--generate", "10"), "more than 24"),
        (("tiny", "--dtype", "int8"), "unknown value of --dtype"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    done = mlx_audit("bench", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize("fill", [4, 6])
def test_rings_that_turn_are_refused_instead_of_measured_at_another_fill(fill: int) -> None:
    model = tiny_model(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=fill + 2)
    sizes = Sizes(fills=[fill], capacities=[64], blocks=3, tokens=4)
    with pytest.raises(MlxAuditError, match="cannot take tokens back") as refused:
        measure(model, sizes, lambda text: None)
    assert "RotatingKVCache" in str(refused.value)
