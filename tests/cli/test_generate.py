"""`mlx-audit generate`: the real checkpoint answers, compiled and eagerly the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import COMMAND, environment, mlx_audit
from proved import write_proof
from real_checkpoints import write_folder, write_gguf

pytestmark = pytest.mark.xdist_group("smollm2")
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("records")
    for family in ("llama", "qwen2"):
        write_proof(folder, family)
    return {"MLX_AUDIT_RECORDS": str(folder)}


@pytest.fixture(scope="module")
def unproved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("records")
    for family in ("llama", "qwen2"):
        (folder / family).mkdir()
        (folder / family / "cpu.json").write_text("{}", encoding="utf-8")
    return {"MLX_AUDIT_RECORDS": str(folder)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama")


def answer(*arguments: str | Path, env: dict[str, str | None]) -> dict[str, Any]:
    done = mlx_audit("generate", *arguments, "--json", env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_smollm2_knows_the_capital_of_france_compiled_as_eagerly(
    proved: dict[str, str | None], unproved: dict[str, str | None]
) -> None:
    arguments = ("--model", "smollm2", "--prompt", QUESTION, "--max-tokens", "16")
    compiled, eager = answer(*arguments, env=proved), answer(*arguments, env=unproved)
    assert "Paris" in compiled["text"]
    assert compiled["finish_reason"] == "stop"
    assert (compiled["compiled"], compiled["reason"], compiled["traces"]) == (True, None, 1)
    assert compiled["capacity"] == compiled["prompt_tokens"] + 16
    assert compiled["tokens"] == eager["tokens"]
    assert (eager["compiled"], eager["traces"]) == (False, 0)
    assert "the record cannot be used" in eager["reason"]


@pytest.mark.parametrize("sampling", [(), ("--temp", "2.0", "--top-p", "0.9", "--seed", "5")])
def test_sampled_tokens_are_the_same_compiled_and_eagerly(
    sampling: tuple[str, ...], tiny: Path, proved: dict[str, str | None], unproved: dict[str, str | None]
) -> None:
    arguments = ("--model", tiny, "--prompt", "hello", "--max-tokens", "24", *sampling)
    compiled, eager = answer(*arguments, env=proved), answer(*arguments, env=unproved)
    assert compiled["compiled"]
    assert not eager["compiled"]
    assert compiled["tokens"] == eager["tokens"]
    assert compiled["prefill_tokens_per_second"] > 0


def test_another_seed_is_another_text(tiny: Path, proved: dict[str, str | None]) -> None:
    arguments = ("--model", tiny, "--prompt", "hello", "--max-tokens", "16", "--temp", "2.0", "--seed")
    first, second, again = (answer(*arguments, seed, env=proved)["tokens"] for seed in ("1", "2", "1"))
    assert first == again
    assert first != second


def test_the_text_goes_to_stdout_and_the_rest_to_stderr(tiny: Path, proved: dict[str, str | None]) -> None:
    arguments = ("generate", "--model", str(tiny), "--prompt", "-", "--max-tokens", "12")
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environment(proved),
        input="hello from stdin\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    same = answer("--model", tiny, "--prompt", "hello from stdin\n", "--max-tokens", "12", env=proved)
    assert done.stdout == same["text"] + "\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"prefill {same['prompt_tokens']} tokens, ")
    assert last.endswith("(compiled, traces: 1)")


def test_the_reason_for_eager_decoding_is_told(tiny: Path, unproved: dict[str, str | None]) -> None:
    done = mlx_audit("generate", "--model", tiny, "--prompt", "hello", "--max-tokens", "2", env=unproved)
    assert done.returncode == 0
    assert "decoding eagerly: llama, variant full" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("(eager)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere", "--prompt", "x"), "no such target"),
        (("--model", "nowhere.gguf", "--prompt", "x"), "nowhere.gguf"),
        (("--model", "llama", "--prompt", "x"), "text needs a checkpoint"),
        (("--model", "smollm2", "--prompt", " "), "the prompt is empty"),
        (("--model", "smollm2", "--prompt", "-"), "the prompt is empty"),
        (("--model", "smollm2"), "--prompt"),
        (("--model", "smollm2", "--prompt", "x", "--max-tokens", "0"), "--max-tokens"),
        (("--model", "smollm2", "--prompt", "x", "--top-p", "2"), "--top-p"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    done = mlx_audit("generate", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    done = mlx_audit("generate", "--model", write_folder(tmp_path), "--prompt", "x")
    assert done.returncode == 2
    assert "the checkpoint has no tokenizer" in done.stderr
