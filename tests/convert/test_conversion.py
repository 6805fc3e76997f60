"""The whole way of a conversion, but for the audit, which is the one of `converted()` again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from converted import Converted, converted
from hf_folders import CARD, write_hf
from mlx_audit.audit.events import Failed
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.convert import conversion
from mlx_audit.convert.child import _answer
from mlx_audit.convert.conversion import Conversion, convert, plan_conversion
from mlx_audit.convert.options import ConvertOptions
from mlx_audit.convert.order import ConversionFailed, Order
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.stamps import check_stamp, load_stamp

pytestmark = pytest.mark.xdist_group("converted")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child would do is done here: it need not load the libraries again. The command line's tests have it."""

    def done(order: Order) -> list[str]:
        answer = _answer(order)
        if answer.error is not None:
            raise ConversionFailed(answer.error)
        return answer.notes

    monkeypatch.setattr(conversion, "convert_in_child", done)


def made(
    source: Path, place: Path, audit: Callable[[Request], Outcome] | None = None, **options: Any
) -> Conversion:
    plan = plan_conversion(str(source), str(place), ConvertOptions(**options))
    return convert(plan, Options(), audit or converted().replay)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_hugging_face_folder_becomes_one_of_mlx(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf")
    (source / "modeling.py").write_text("raise SystemExit")
    before = contents(source)
    result = made(source, tmp_path / "made", dtype="bfloat16")
    assert result.folder == tmp_path / "made"
    assert result.remarks == ["left out: modeling.py (code is never copied, nor run)"]
    assert contents(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "made"]
    assert check_stamp(result.folder) == []
    assert not list(result.folder.glob("*.py"))
    weights = mx.load(str(result.folder / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.bfloat16}
    card = (result.folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: mit\ntags:\n- tiny\n- mlx-audit\n---\n\n# A tiny model\n")
    _, tokenizer = mlx_lm.load(str(result.folder))
    assert tokenizer.encode("hello") == mlx_lm.utils.load_tokenizer(source).encode("hello")


def test_a_folder_of_mlx_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "mlx", form="mlx")
    before = contents(source)
    result = made(source, tmp_path / "made")
    after = contents(result.folder)
    assert after.keys() - before.keys() == {"mlx_audit.json"}
    assert {name for name in before if after[name] != before[name]} == {"README.md"}
    assert contents(source) == before


def test_a_stamp_in_place_writes_two_files_and_touches_nothing_else(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "mlx", form="mlx")
    (source / "notes.py").write_text("mine")
    before = {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in source.iterdir()
    }
    for _ in range(2):
        result = made(source, source)
        after = {
            path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
            for path in source.iterdir()
        }
        assert after.keys() - before.keys() == {"mlx_audit.json"}
        assert {name for name in before if after[name] != before[name]} == {"README.md"}
        assert check_stamp(source) == []
    card = (source / "README.md").read_text(encoding="utf-8")
    assert card.count("mlx-audit: begin") == 1
    assert card.split("\n<!-- mlx-audit: begin")[0] == CARD.replace("- tiny\n", "- tiny\n- mlx-audit\n")
    assert result.remarks == []


def test_a_new_audit_makes_a_stale_stamp_fresh(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "mlx", form="mlx")
    made(source, source)
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert check_stamp(source) == ["model.safetensors changed since (sha256)"]
    made(source, source)
    assert check_stamp(source) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": True}, "never rewritten for a stamp"),
        ({"dtype": "float16"}, "never rewritten for a stamp"),
    ],
    ids=["quantize", "dtype"],
)
def test_weights_are_never_rewritten_in_place(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = write_hf(tmp_path / "mlx", form="mlx")
    with pytest.raises(MlxAuditError, match=message):
        made(source, source, **options)


def test_a_quantized_folder_is_not_quantized_again_but_can_be_dequantized(tmp_path: Path) -> None:
    with pytest.raises(MlxAuditError, match="the source is quantized already"):
        made(converted().folder, tmp_path / "again", quantize=True)
    result = made(converted().folder, tmp_path / "plain", dequantize=True)
    weights = mx.load(str(result.folder / "model.safetensors"))
    assert not any(name.endswith(".scales") for name in weights)
    assert "quantization" not in json.loads((result.folder / "config.json").read_text(encoding="utf-8"))


def test_a_planted_fault_is_never_stamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_AUDIT_PLANT", "frozen_write")
    with pytest.raises(MlxAuditError, match="no stamp is made while a fault is planted"):
        made(write_hf(tmp_path / "hf"), tmp_path / "made")


def failing(request: Request) -> Outcome:
    """Return the outcome of an audit in which one check failed, with paths of this machine in its reason."""
    outcome = converted().replay(request)
    (result,) = outcome.results
    reason = f"logits differ: {request.folder}/config.json"
    checks = [
        check.model_copy(update={"status": "fail", "reason": reason}) if check.code == "CKP001" else check
        for check in result.checks
    ]
    verdict = {"verdict": "not-capable", "reason": f"CKP001 {request.folder}"}
    decode = result.claims["compiled_decode"].model_copy(update=verdict)
    claims = {**result.claims, "compiled_decode": decode}
    outcome.results = [result.model_copy(update={**verdict, "checks": checks, "claims": claims})]
    return outcome


def test_a_model_that_is_not_capable_is_stamped_as_such(tmp_path: Path) -> None:
    result = made(write_hf(tmp_path / "mlx", form="mlx"), tmp_path / "made", failing)
    assert result.outcome.results[0].reason == f"CKP001 {tmp_path / 'made'}"
    stamp = load_stamp(result.folder)
    assert stamp is not None
    assert (stamp.verdict, stamp.claims["compiled_decode"].verdict) == ("not-capable", "not-capable")
    assert check_stamp(result.folder) == []
    text = (result.folder / "mlx_audit.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "logits differ: ./config.json" in text
    assert "**not\\-capable**" in (result.folder / "README.md").read_text(encoding="utf-8")


def unusable(request: Request) -> Outcome:
    return Outcome(request, [], None, [], Failed(message=f"{request.folder}: no", exit_code=2))


def interrupted(request: Request) -> Outcome:
    raise KeyboardInterrupt("by Ctrl-C")


def changing(request: Request) -> Outcome:
    assert request.folder is not None
    (request.folder / "tokenizer.json").write_text("{}")
    return converted().replay(request)


def swapping(request: Request) -> Outcome:
    """What is audited is another file, which is gone when the hashes are taken again."""
    assert request.folder is not None
    file, kept = request.folder / "tokenizer.json", request.folder.parent / "kept"
    file.rename(kept)
    file.write_text("{}")
    kept.replace(file)
    return converted().replay(request)


def filling(request: Request) -> Outcome:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("audit", "error", "message"),
    [
        (unusable, ConversionFailed, "made: no"),
        (interrupted, KeyboardInterrupt, "by Ctrl-C"),
        (changing, ConversionFailed, "files changed while they were audited"),
        (swapping, ConversionFailed, "files changed while they were audited"),
        (filling, ConversionFailed, "No space left on device"),
    ],
)
def test_what_ends_early_leaves_nothing(
    tmp_path: Path, audit: Callable[[Request], Outcome], error: type[BaseException], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        made(write_hf(tmp_path / "mlx", form="mlx"), tmp_path / "made", audit)
    assert [path.name for path in tmp_path.iterdir()] == ["mlx"]
    assert ".mlx-audit-" not in str(raised.value)


def configure(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def _own_code(folder: Path, name: str) -> None:
    code = f"open({str(folder.parent / 'EXECUTED')!r}, 'w')\nclass T: pass\n"
    (folder / "evil.py").write_text(code, encoding="utf-8")
    configure(folder, name, auto_map={"AutoTokenizer": ["evil.T", None], "AutoConfig": "evil.T"})
    configure(folder, "tokenizer_config.json", tokenizer_class="T")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "tokenizer that is no JSON": lambda f: (f / "tokenizer.json").write_text("{"),
    "tokenizer of a list": lambda f: (f / "tokenizer.json").write_text("[]"),
    "deep tokenizer": lambda f: (f / "tokenizer.json").write_text("[" * 100_000),
    "deep settings": lambda f: (f / "tokenizer_config.json").write_text("[" * 100_000),
    "vocabulary of lists": lambda f: configure(
        f, "tokenizer.json", model={"type": "BPE", "vocab": [], "merges": 1}
    ),
    "sizes that are texts": lambda f: configure(f, "config.json", hidden_size="64"),
    "heads of nothing": lambda f: configure(f, "config.json", num_attention_heads=0),
    "layers that are a text": lambda f: configure(f, "config.json", num_hidden_layers="4"),
    "another width": lambda f: configure(f, "config.json", hidden_size=1 << 40),
    "a vocabulary of 10^12": lambda f: configure(f, "config.json", vocab_size=10**12),
    "fewer layers": lambda f: configure(f, "config.json", num_hidden_layers=3),
    "quantized by a text": lambda f: configure(f, "config.json", quantization="4"),
    "a RoPE of lists": lambda f: configure(f, "config.json", rope_scaling=[1]),
}


@pytest.mark.parametrize(("case", "form"), list(zip(HOSTILE, cycle(["pt", "mlx"]), strict=False)))
def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(tmp_path: Path, case: str, form: str) -> None:
    source = write_hf(tmp_path / "hf", form=form)
    HOSTILE[case](source)
    with pytest.raises(MlxAuditError) as refused:
        made(source, tmp_path / "made", lambda request: pytest.fail("this was audited"))
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "form"),
    [("tokenizer_config.json", "pt"), ("tokenizer_config.json", "mlx"), ("config.json", "pt")],
)
def test_code_of_the_checkpoint_is_never_run_nor_copied(tmp_path: Path, name: str, form: str) -> None:
    source = write_hf(tmp_path / "hf", form=form)
    _own_code(source, name)
    try:
        result = made(source, tmp_path / "made")
        assert not list(result.folder.glob("**/*.py"))
    except MlxAuditError as refused:
        assert refused.exit_code == 2
    assert not (tmp_path / "EXECUTED").exists()


def test_the_shared_conversion_is_what_it_says() -> None:
    shared: Converted = converted()
    assert shared.done.returncode == 0, shared.done.stderr
    assert check_stamp(shared.folder) == []
