"""`mlx-audit convert`: what it makes runs in mlx-lm and here alike, and one changed byte is told by every reader."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from command import COMMAND, environment, mlx_audit
from converted import converted
from hf_folders import write_hf
from mlx_audit.cli.convert import convert
from mlx_audit.cli.generate import generate
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.stamps import check_stamp, load_stamp
from mlx_audit.models.checkpoint import chat_ids
from proved import write_proof
from real_checkpoints import flip, write_gguf

pytestmark = pytest.mark.xdist_group("converted")
TOKENS = "24"


def mlx_lm_text(folder: Path, prompt: str, tokens: str) -> str:
    """Return what mlx-lm's own command line answers."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", "--model", str(folder), "--prompt", prompt]
        + ["--max-tokens", tokens, "--temp", "0"],
        env=environment({"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    rule = "=" * 10 + "\n"
    return done.stdout.split(rule, 1)[1].rsplit("\n" + rule, 1)[0]


def require_same_tokens(folder: Path, records: Path, prompt: str, tokens: str = TOKENS) -> None:
    """Run mlx-lm and mlx-audit, each as its users do, and compare text and tokens."""
    arguments = ("generate", "--model", folder, "--prompt", prompt, "--max-tokens", tokens, "--json")
    done = mlx_audit(*arguments, env={"MLX_AUDIT_RECORDS": str(records)})
    assert (done.returncode, "stamp" in done.stderr) == (0, False), done.stderr
    ours = json.loads(done.stdout)
    assert ours["compiled"], ours["reason"]
    model, tokenizer = mlx_lm.load(str(folder))
    ids = chat_ids(tokenizer, [{"role": "user", "content": prompt}])
    theirs = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=int(tokens))]
    stop = next((at for at, token in enumerate(theirs) if token in tokenizer.eos_token_ids), len(theirs))
    assert ours["tokens"] == theirs[:stop]
    assert len(set(ours["tokens"])) > 2
    assert mlx_lm_text(folder, prompt, tokens) == ours["text"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for family in ("qwen2", "llama"):
        write_proof(folder, family)
    return folder


def test_a_folder_is_converted_audited_and_stamped() -> None:
    shared = converted()
    assert shared.done.returncode == 0, shared.done.stderr
    assert "1 capable; all claims hold" in shared.done.stdout
    assert "left out: modeling_tiny.py (code is never copied, nor run)" in shared.done.stderr
    assert "left out: pytorch_model.bin (a pickle could run code)" in shared.done.stderr
    assert f"stamped capable: {shared.folder / 'mlx_audit.json'}" in shared.done.stderr
    assert sorted(path.name for path in shared.folder.iterdir()) == [
        *("README.md", "chat_template.jinja", "config.json", "mlx_audit.json", "model.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert sorted(path.name for path in shared.folder.parent.iterdir()) == ["hf", "out.json", "tiny-4bit"]
    (result,) = shared.results.results
    stamp = load_stamp(shared.folder)
    assert stamp is not None
    assert (result.configuration, result.verdict) == ("tiny-4bit", "capable")
    assert {(c.code, c.status) for c in stamp.checks} == {(c.code, c.status) for c in result.checks}
    real = {c.code: c.status for c in stamp.checks if c.tier == "checkpoint"}
    assert real == dict.fromkeys(("CKP001", "CKP002", "CKP003", "CKP004"), "pass")
    assert json.loads((shared.folder / "config.json").read_text())["quantization"]["bits"] == 4


def test_mlx_lm_and_mlx_audit_say_the_same(records: Path) -> None:
    require_same_tokens(converted().folder, records, "hello world")


def test_one_changed_weight_byte_is_told_by_run_and_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(converted().folder, folder)
    assert check_stamp(folder) == []
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 5)
    told = (
        f"stamp: stale: model.safetensors changed since (sha256); fix: mlx-audit convert {folder} {folder}\n"
    )
    run = mlx_audit("run", folder, "--only", "TOP001", "--json", "-")
    assert run.returncode == 0
    assert told in run.stderr
    assert "stamp" not in run.stdout
    assert generate(str(folder), "hello", max_tokens=2, json=True) == 0
    said = capsys.readouterr()
    assert said.err.count("stamp: stale") == 1
    assert told in said.err
    assert "stamp" not in said.out


@pytest.mark.parametrize(
    ("source", "place", "options", "message"),
    [
        ("hf", "made", {"quantize": True, "q_bits": 7}, "--q-bits: --q-mode affine has no such size"),
        ("hf", "made", {"q_mode": "mxfp"}, "unknown value of --q-mode; found: 'mxfp'"),
        ("hf", "made", {"quant_predicate": "mixed"}, "unknown value of --quant-predicate"),
        ("hf", "made", {"dtype": "int8"}, "unknown value of --dtype"),
        ("hf", "made", {"profile": "slow"}, "unknown value of --profile"),
        ("hf", "made", {"json": "hf/config.json"}, "this would write over what is audited"),
        ("hf", "made", {"timeout": float("inf")}, "no usable time-out"),
        ("hf", ".", {}, "the folder is there and not empty"),
        ("hf", "hf/made", {}, "one of SRC and DST lies within the other"),
        ("absent", "made", {}, "no such checkpoint"),
        ("", "made", {}, "the target is empty"),
    ],
)
def test_usage_errors_come_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    place: str,
    options: dict[str, Any],
    message: str,
) -> None:
    shutil.copytree(converted().source, tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MlxAuditError, match=re.escape(message)) as refused:
        convert(source, place, **options)
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama")
    done = subprocess.run(
        [*COMMAND, "convert", source, tmp_path / "made"],
        env=environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        # A limit for files alone is what a full disk is: the weights take 220 kB.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "the checkpoint cannot be converted" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def require_nothing_but_a_leftover(folder: Path, source: Path) -> None:
    (left,) = (path.name for path in folder.iterdir() if path != source)
    assert left.startswith(".made.mlx-audit-")


def test_a_killed_run_leaves_no_destination(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama")
    _kill_when(tmp_path, source, "made/config.json")
    require_nothing_but_a_leftover(tmp_path, source)


@pytest.mark.nightly
def test_a_run_killed_after_its_audit_leaves_no_destination(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama")
    _kill_when(tmp_path, source, "made/mlx_audit.json")
    require_nothing_but_a_leftover(tmp_path, source)
    assert mlx_audit("convert", source, tmp_path / "made").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "tiny.gguf"]


def _kill_when(folder: Path, source: Path, wanted: str) -> None:
    """Kill a conversion as soon as a file of its temporary folder is there."""
    with subprocess.Popen(
        [*COMMAND, "convert", source, folder / "made"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        deadline = time.monotonic() + 120
        while not list(folder.glob(f".made.mlx-audit-*/{wanted}")):
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.002)
        running.kill()
    assert running.returncode == -signal.SIGKILL


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [(), ("-q",), ("--dequantize", "--dtype", "bfloat16")], ids=["plain", "4 bits", "bf16"]
)
def test_smollm2_says_the_same(tmp_path: Path, records: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "smollm2"
    done = subprocess.run(
        [*COMMAND, "convert", "smollm2", str(folder), "--timeout", "3000", *options],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_stamp(folder) == []
    require_same_tokens(folder, records, "What is the capital of France?", "32")
    flip(folder / "model.safetensors", 50_000_000)
    assert check_stamp(folder) == ["model.safetensors changed since (sha256)"]


@pytest.mark.nightly
def test_a_plain_folder_says_the_same_and_is_stamped_anew_in_place(tmp_path: Path, records: Path) -> None:
    source = write_hf(tmp_path / "hf")
    assert mlx_audit("convert", source, tmp_path / "plain").returncode == 0
    require_same_tokens(tmp_path / "plain", records, "hello world")
    flip(tmp_path / "plain" / "model.safetensors", 9_000)
    done = mlx_audit("convert", tmp_path / "plain", tmp_path / "plain")
    assert (done.returncode, check_stamp(tmp_path / "plain")) == (0, []), done.stderr
