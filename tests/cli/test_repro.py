"""A failure as a script of mlx and mlx-lm alone: it stands alone, shows the difference, and is small."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from audited import check, mutated, new_subject
from command import mlx_audit
from kind_models import KINDS, kind_subject
from mlx_audit import resources
from mlx_audit.audit.events import CheckFinished, Event, Planned, Reproduced
from mlx_audit.audit.reproduction import _literal, render, reproduced
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.worker import audit
from mlx_audit.checks import shrunk
from mlx_audit.checks.base import execute
from mlx_audit.checks.scenario import Scenario
from mlx_audit.checks.shrunk import smallest
from mlx_audit.checks.subject import Subject
from mlx_audit.evidence.results import CheckResult
from mlx_audit.faults import FAULTS
from mlx_audit.models.target import resolve_target
from model_files import write_config, write_model
from tiny_models import module_of

FAILED = CheckResult(
    code="PAR001", name="Logits equal eager decoding's", tier="numeric", status="fail", reason="they differ"
)
ROPE = "            keys = self.rope(keys, offset=cache.offset)\n"
ATTENTION = "        output = scaled_dot_product_attention(\n"
UNMASKED = (ATTENTION, f"        if queries.shape[2] == 1:\n            mask = None\n{ATTENTION}")
UPSTREAM = {
    "model_type": "afm7",
    "vocab_size": 64,
    "hidden_dim": 32,
    "num_layers": 4,
    "num_kv_reuse_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 2.0,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
"""A family of mlx-lm that turns queries by the length of the keys."""

WRONG = {
    "position from the width of the keys": (
        "            keys, values = cache.update_and_fetch(keys, values)\n",
        (
            "            keys, values = cache.update_and_fetch(keys, values)\n"
            "            queries = self.rope(queries, offset=keys.shape[2])\n"
        ),
    ),
    "position read on the host": (ROPE, ROPE.replace("cache.offset", "int(cache.offset)")),
    "mask left out": UNMASKED,
}
CODES = {"mask left out": "TRC005"}
ALONE = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx_audit", "hypothesis", "pydantic", "audited"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
for path in sys.argv[1:]:
    print(runpy.run_path(path)["main"](), end="\\n---\\n")
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each script prints, line by line; all are run in one process that has mlx and mlx-lm alone."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {what: _failing(_mutant(what, folder), CODES.get(what, "TRC001")) for what in WRONG}
    scripts["afm7"] = _failing(
        Subject("afm7", "default", "tiny", module_of("afm7"), UPSTREAM, UPSTREAM), "TRC001"
    )
    turns = Scenario(13, 9, 25, chunk=5)
    for kind in HEALTHY:
        scripts[kind] = render(_subject(kind), FAILED, turns, None)
    paths = [folder / f"script_{index}.py" for index in range(len(scripts))]
    for path, text in zip(paths, scripts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split("---\n")[:-1]
    return {name: text.splitlines() for name, text in zip(scripts, outputs, strict=True)}


HEALTHY = ["linear", *(kind for kind in KINDS if kind not in ("chunked", "quantized"))]


def _subject(kind: str) -> Subject:
    return new_subject() if kind == "linear" else kind_subject(kind)


def _mutant(what: str, folder: Path) -> Subject:
    return new_subject(module=mutated(folder, WRONG[what]))


def _failing(subject: Subject, code: str) -> str:
    result = execute(check(code), subject, {})
    assert result.status == "fail", result.reason
    return reproduced(0, subject, [result]).script


@pytest.mark.parametrize("what", [*WRONG, "afm7"])
def test_a_failure_shows_without_mlx_audit(what: str, shown: dict[str, list[str]]) -> None:
    *_, last, code = shown[what]
    assert last.startswith("DIFFERENT at step 1: "), shown[what]
    assert code == "1"
    assert ("compiled decoding raises ValueError" in last) == (what == "position read on the host")


@pytest.mark.parametrize("kind", HEALTHY)
def test_the_script_s_own_caches_are_right(kind: str, shown: dict[str, list[str]]) -> None:
    lines = shown[kind]
    assert lines[-2:] == ["equal", "0"], lines
    assert len(lines) == 12, "the prompt, nine steps, the outcome and the exit code"


def test_weights_are_those_that_the_check_saw(tmp_path: Path) -> None:
    subject = kind_subject("composite")  # with kernels that the module leaves at zero
    (tmp_path / "script.py").write_text(render(subject, FAILED, Scenario(1, 1), None), encoding="utf-8")
    built = runpy.run_path(str(tmp_path / "script.py"))["build"]()
    pairs = zip(tree_flatten(built.parameters()), tree_flatten(subject.model.parameters()), strict=True)
    assert all(name == other and mx.array_equal(got, want) for (name, got), (other, want) in pairs)


class TestSmallest:
    def test_a_write_that_stops_at_a_slot_needs_so_many_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FAULTS["write_dropped_from_16"](monkeypatch)
        monkeypatch.setattr(shrunk, "SECONDS", 300.0)  # what is found must not depend on the machine
        scenario, location = smallest(new_subject(), Scenario(15, 3, 19, chunk=3))
        assert location is not None
        assert (location.slot, location.consumer) == (16, "write")
        assert scenario.prompt + scenario.steps == 17
        assert scenario.chunk == 0

    def test_the_usual_scenario_where_nothing_differs(self) -> None:
        assert smallest(new_subject()) == (Scenario(13, 4), None)


@pytest.mark.parametrize("kind", ["chunked", "quantized"])
def test_a_cache_that_the_script_lacks_is_named(kind: str) -> None:
    event = reproduced(0, kind_subject(kind), [FAILED])
    assert not event.script
    assert "the script has no cache of its own for " in event.meaning


def test_what_is_no_matter_of_decoding_has_no_script() -> None:
    event = reproduced(0, new_subject(), [FAILED.model_copy(update={"code": "TOP001", "tier": "static"})])
    assert (event.script, event.code) == ("", "TOP001")


def test_texts_of_the_model_stay_comments_and_strings() -> None:
    text = "\"\"\"\nimport os; os.abort()\r\n\u2028'''\\"
    hostile = FAILED.model_copy(update={"reason": text, "where": text})
    script = render(new_subject(), hostile, Scenario(1, 1), None)
    lines = [line for line in script.splitlines() if "os.abort" in line]
    assert lines
    assert all(line.startswith("# ") for line in lines)
    for source in (text, "a\\", "x'", "plain\n\\n"):
        assert eval(_literal(source)) == source


def test_a_broken_claim_comes_before_one_that_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (resources.model_audits() / "llama.yaml").read_text(encoding="utf-8")
    for pattern, new in (
        (r"configurations:\n(?:  - .*\n)+", ""),
        (r"rope: .*", "rope: [default, {dynamic: undecided}]"),
    ):
        text, count = re.subn(pattern, new, text)
        assert count == 1, pattern
    (tmp_path / "llama.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("MLX_AUDIT_PLANT", "ring_write_one_late")  # in the second variant alone
    events: list[Event] = []
    options = Options(only=["TRC001", "STA001"], repro=True)
    audit(Request.of(resolve_target(str(tmp_path / "llama.yaml")), options), events.append)
    (planned,) = [event for event in events if isinstance(event, Planned)]
    failed = [e for e in events if isinstance(e, CheckFinished) and e.check.status == "fail"]
    assert [planned.subjects[event.subject].claimed for event in failed][:2] == ["undecided", "undecided"]
    (made,) = [event for event in events if isinstance(event, Reproduced)]
    chosen = planned.subjects[made.subject]
    assert (chosen.variant, chosen.configuration, made.code) == ("sliding", "tiny", "STA001")


class TestCommand:
    def test_a_model_s_failure(self, tmp_path: Path) -> None:
        model, config, script = (
            write_model(tmp_path, "mine", UNMASKED),
            write_config(tmp_path),
            tmp_path / "r.py",
        )
        done = mlx_audit("run", model, "--config", config, "--only", "PAR001", "--repro", script)
        assert done.returncode == 1
        assert f"{script} reproduces PAR001: it prints 'DIFFERENT at step 1: " in done.stderr
        assert "first divergence: step 1, caches[0]: attention" in done.stdout
        assert "SOURCE = r'''" in script.read_text(encoding="utf-8")

    def test_a_failure_of_mlx_audit_s_own(self, tmp_path: Path) -> None:
        model, config, script = write_model(tmp_path, "mine"), write_config(tmp_path), tmp_path / "r.py"
        plant = {"MLX_AUDIT_PLANT": "write_one_late"}
        done = mlx_audit("run", model, "--config", config, "--only", "PAR001", "--repro", script, env=plant)
        assert done.returncode == 1
        assert "shows no difference, so the failure lies in mlx-audit's caches or session" in done.stderr

    def test_nothing_failed(self, tmp_path: Path) -> None:
        model, config, script = write_model(tmp_path, "mine"), write_config(tmp_path), tmp_path / "r.py"
        done = mlx_audit("run", model, "--config", config, "--only", "TRC005", "--repro", script)
        assert done.returncode == 0, done.stdout
        assert "--repro wrote nothing: no check failed" in done.stderr
        assert not script.exists()
