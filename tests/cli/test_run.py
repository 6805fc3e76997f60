"""`mlx-audit run`: what it prints, what it writes, and its exit code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from command import SharedRun, mlx_audit, results_of, shared_run
from mlx_audit import resources
from mlx_audit.cli._choices import DTYPES
from mlx_audit.cli._render import cost_line
from mlx_audit.evidence.results import Results
from mlx_audit.models import build
from model_files import ABORT, FORWARD, write_config, write_model

PUBLISHED = resources.model_audits() / "configurations"
shares_the_run = pytest.mark.xdist_group("shared_run")


@pytest.fixture(scope="module")
def shared() -> SharedRun:
    return shared_run()


@shares_the_run
def test_both_families_hold_their_claims(shared: SharedRun) -> None:
    assert shared.done.returncode == 0, shared.done.stdout
    claimed = [r for r in shared.results.results if r.claims["compiled_decode"].claimed == "capable"]
    assert {result.verdict for result in claimed} == {"capable"}
    assert {(r.family, r.variant) for r in claimed} == {
        ("qwen2", "full"),
        ("llama", "full"),
        ("llama", "sliding"),
    }
    main = shared.result("qwen2", "full", "tiny")
    others = {check.code: check.reason for check in main.checks if check.status != "pass"}
    assert others == {
        "PAR008": "the source is as installed",
        "TOP004": "the configuration has no layer_types",
    }
    assert all(check.figures for check in main.checks if check.code not in others)


@shares_the_run
def test_claims_undecided_are_reported_and_move_nothing(shared: SharedRun) -> None:
    open_claims = [r for r in shared.results.results if r.claims["compiled_decode"].claimed == "undecided"]
    assert {(r.family, r.variant) for r in open_claims} == {
        ("qwen2", "full"),
        ("llama", "full"),
        ("llama", "sliding"),
    }
    assert all(result.verdict != "capable" for result in open_claims)
    dynamic = shared.result("qwen2", "full", "tiny+dynamic")
    failed = next(check for check in dynamic.checks if check.status == "fail")
    assert failed.code == "SRC001"
    assert failed.where is not None
    assert re.fullmatch(r"mlx_lm/models/rope_utils\.py:\d+:\d+", failed.where)


@shares_the_run
def test_a_published_configuration_carries_the_numeric_checks_of_tiny(shared: SharedRun) -> None:
    result = shared.result("llama", "full", "meta-llama--Llama-3.2-1B")
    on = {check.code: check.figures.get("on") for check in result.checks}
    assert on["TRC001"] is None
    assert on["PAR001"] == "tiny+llama3"
    assert on["LIF001"] == "tiny"


@shares_the_run
def test_the_text_has_one_line_a_result_in_columns(shared: SharedRun) -> None:
    lines = shared.done.stdout.splitlines()
    heads = [line for line in lines if not line.startswith(" ") and line[:1] in "●◐✕?"]
    assert len(heads) == len(shared.results.results)
    first = re.sub(r"\d+ checks", "N checks", heads[0])
    head, _, rest = first.partition("claimed capable    ")
    assert head == "● capable      qwen2 full     tiny                                 "
    assert rest == "N checks passed; prefix restore capable: N checks passed"
    width = {line.index("claimed ") for line in heads}
    assert len(width) == 1
    assert "…" not in shared.done.stdout
    assert "\x1b" not in shared.done.stdout
    assert shared.done.stderr == ""


@shares_the_run
@pytest.mark.parametrize(
    ("equal", "cache", "told"),
    [
        (2_499, 377, "cache equals weights at 2,499 tokens"),
        (0, 4, "the cache does not grow with the text"),
        (0, 377, "the cache outweighs the weights at any capacity"),
    ],
)
def test_a_cache_of_constant_size_equals_the_weights_nowhere(equal: int, cache: int, told: str) -> None:
    cost = {"capacity": 8192, "weights_bytes": 115, "cache_bytes": cache, "primitives": 9}
    assert cost_line({**cost, "equal_capacity": equal}).endswith(f"; {told}")


def test_the_text_names_costs_failures_and_what_was_left_out(shared: SharedRun) -> None:
    text = shared.done.stdout
    assert re.search(
        r"^    a step at 8,192 tokens reads 988 MB of weights and 101 MB of cache in ", text, re.MULTILINE
    )
    assert "      reproduce: mlx-audit run qwen2 --only TRC001 --seed 0 --profile quick" in text
    assert "qwen2: not traced (same arguments as Qwen--Qwen2-7B): Qwen--Qwen2.5-7B\n" in text
    last = text.splitlines()[-1]
    assert re.fullmatch(
        r"\d+ results in [\d.]+ s: \d+ capable, .+; all claims hold \(\d+ claimed undecided.+\)", last
    )


def test_a_published_configuration_is_traced_at_full_size() -> None:
    config = PUBLISHED / "meta-llama--Meta-Llama-3.1-405B.json"
    done = mlx_audit("run", "--tier", "trace,static", "llama", "--config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "a step at 8,192 tokens reads 808 GB of weights and 4.23 GB of cache" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("the selected checks hold")


def test_json_to_stdout_leaves_the_text_to_stderr(tmp_path: Path) -> None:
    model, config = write_model(tmp_path, "mine"), write_config(tmp_path)
    done = mlx_audit("run", model, "--config", config, "--only", "TRC001", "--json", "-")
    assert done.returncode == 0
    results = Results.model_validate_json(done.stdout)
    assert [check.code for check in results.results[0].checks] == ["TRC001"]
    assert json.loads(done.stdout)["schema"] == "mlx-audit/results/1"
    assert "the selected checks hold" in done.stderr


def test_a_crash_is_shown_with_the_signal_and_the_next_target_runs(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    aborts = write_model(tmp_path, "aborts", (FORWARD, ABORT))
    healthy = write_model(tmp_path, "healthy")
    done = mlx_audit("run", aborts, healthy, "--config", config, "--tier", "trace")
    assert done.returncode == 1
    assert [line[0] for line in done.stdout.splitlines() if line[0] != " "] == ["✕", "?", "2"]
    assert "the process died with SIGABRT (signal 6) during TRC001" in done.stdout
    assert re.search(r"^      at aborts\.py:\d+$", done.stdout, re.MULTILINE)
    assert f"reproduce: mlx-audit run {aborts} --config {config} --only TRC001" in done.stdout


def test_a_target_that_cannot_be_built_is_a_usage_error(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}', encoding="utf-8")
    done = mlx_audit("run", write_model(tmp_path, "mine"), "--config", config)
    assert done.returncode == 2
    assert "does not fit the model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"MLX_DISABLE_COMPILE": "1"}, "unset it"),
        ({"PATH": "{python}", "TMPDIR": "{empty}"}, "install g++"),
    ],
)
def test_without_compilation_nothing_is_decided(tmp_path: Path, env: dict[str, str], why: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "empty").mkdir()
    places = {"python": str(tmp_path / "bin"), "empty": str(tmp_path / "empty")}
    code, results = results_of("qwen2", env={name: value.format(**places) for name, value in env.items()})
    assert code == 4
    claimed = [r for r in results if r.claims["compiled_decode"].claimed == "capable"]
    assert {result.verdict for result in claimed} == {"undecided"}
    assert all(result.reason.startswith("ENV001 was not run: ") for result in claimed)
    assert all(why in result.reason for result in claimed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no target"),
        (["qwen3000"], "no such target"),
        (["qwen2", "--only", "TRC01"], "did you mean 'TRC001'?"),
        (["qwen2", "--only", "trc001"], "did you mean 'TRC001'?"),
        (["qwen2", "--tier", "static,numerc"], "did you mean 'numeric'?"),
        (["qwen2", "--profile", "nightley"], "did you mean 'nightly'?"),
        (["qwen2", "--dtype", "bfloat"], "did you mean 'bfloat16'?"),
        (["--all", "--config", "x.json"], "does not go with --all"),
        (["qwen2", "--config", "nowhere.json"], "nowhere.json"),
        (["qwen2", "--record", "--only", "TRC001"], "no record can be made"),
        (["qwen2", "--json", "nowhere/out.json"], "no such folder"),
        (["qwen2", "--seed", "x"], "--seed"),
    ],
)
def test_usage_errors_come_before_any_work(arguments: list[str], message: str) -> None:
    done = mlx_audit("run", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_dtypes_are_those_that_models_can_be_built_in() -> None:
    assert tuple(build.DTYPES) == DTYPES
