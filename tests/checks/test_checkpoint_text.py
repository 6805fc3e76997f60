"""CKP001-004 on checkpoints with a tokenizer: text, a second turn, and where generation stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audited import check, green, only, red
from mlx_audit.audit.plan import make_plan
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.worker import audit
from mlx_audit.checks.base import execute
from mlx_audit.checks.real_text import QUESTION, RealText
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.models import checkpoint as checkpoints
from mlx_audit.models.checkpoint import Checkpoint
from mlx_audit.models.target import resolve_target
from real_checkpoints import write_folder, write_gguf

CODES = ("CKP001", "CKP002", "CKP003", "CKP004")


def subject_of(path: Path | str) -> Subject:
    """Return the subject that `run PATH` looks at."""
    plan = make_plan(Request.of(resolve_target(str(path)), Options(tiers=["checkpoint"])))
    assert [item.code for item in plan.entries[0].checks] == list(CODES)
    assert plan.entries[0].subject is not None
    return plan.entries[0].subject


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", request.param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(write_folder(tmp_path_factory.mktemp("folder")))


@pytest.mark.parametrize("code", CODES)
def test_with_a_tokenizer_64_tokens_of_text_are_compared(code: str, subject: Subject) -> None:
    figures = green(code, subject).figures
    assert figures.get("max_difference", 0.0) == 0.0
    if code == "CKP001":
        assert (figures["steps"], figures["traces"], figures["dtype"]) == (64, 1, "float32")
    else:
        assert isinstance(figures["text"], str)
    if code == "CKP002":
        assert figures["tokens"] == 64


def test_the_text_is_english_and_the_prompt_a_chat(subject: Subject) -> None:
    real = RealText(subject)
    assert real.tokenizer is not None
    assert real.tokenizer.decode(real.tokens(24)).startswith("It was the best of times")
    assert real.tokenizer.decode(real.prompt()).endswith(f"user\n{QUESTION}<|im_end|>\n")
    assert len(real.tokens(5000)) == 5000


def test_a_second_turn_is_what_the_chat_adds(subject: Subject) -> None:
    real = RealText(subject)
    assert real.tokenizer is not None
    held = [*real.prompt(), *real.tokenizer.encode("<|im_start|>assistant\nParis")]
    reply = real.tokenizer.encode("Paris")
    question = "And which river flows through it?"
    turn = real.tokenizer.decode(real.second_turn(held, reply))
    assert turn == f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    assert real.second_turn([*held, 0], reply) == real.tokenizer.encode(question)


@pytest.mark.parametrize("code", CODES)
def test_without_a_tokenizer_few_random_tokens_are_compared(code: str, folder: Subject) -> None:
    result = only(code, folder)
    if code == "CKP004":
        assert (result.status, result.reason) == ("not-applicable", "the checkpoint has no tokenizer")
        return
    assert result.status == "pass", result.reason
    assert result.figures.get("steps", 16) == result.figures.get("tokens", 16) == 16
    assert "text" not in result.figures


def test_the_stop_token_is_yielded(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Session._generate

    def generate(self: Session, ids: Any, count: int, sampler: Any, stop: frozenset[int]) -> Iterator[int]:
        for token in own(self, ids, count, sampler, frozenset()):
            yield token
            if token in stop:
                return

    monkeypatch.setattr(Session, "_generate", generate)
    assert "tokens, wanted" in red("CKP004", subject).reason
    assert only("CKP002", subject).status == "pass"


def test_stop_tokens_are_ignored(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Session._generate
    monkeypatch.setattr(
        Session, "_generate", lambda self, ids, count, sampler, _: own(self, ids, count, sampler, frozenset())
    )
    assert "tokens, wanted" in red("CKP004", subject).reason


def test_the_tokenizer_keeps_its_stop_tokens(subject: Subject) -> None:
    assert subject.real.tokenizer is not None
    before = set(subject.real.tokenizer.eos_token_ids)
    green("CKP004", subject)
    assert subject.real.tokenizer.eos_token_ids == before


def test_a_continuation_in_the_wrong_order(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Session.extend
    monkeypatch.setattr(
        Session, "extend", lambda self, tokens: own(self, [list(reversed(row)) for row in tokens])
    )
    result = red("CKP003", subject)
    assert "logits differ at the second turn" in result.reason
    assert only("CKP001", subject).status == "pass"


def test_the_model_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []
    own = checkpoints.read_gguf
    monkeypatch.setattr(checkpoints, "read_gguf", lambda path: loads.append(path) or own(path))
    request = Request.of(resolve_target(str(write_gguf(tmp_path / "x.gguf"))), Options(tiers=["checkpoint"]))
    events: list[Any] = []
    audit(request, events.append)
    statuses = [event.check.status for event in events if hasattr(event, "check")]
    assert statuses == ["pass"] * 4
    assert len(loads) == 1


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    result = execute(check("CKP001"), subject_of(tmp_path), {})
    assert result.status == "fail"
    assert "the tokenizer cannot be loaded" in result.reason


def test_a_folder_with_a_tokenizer_is_read_like_the_file(tmp_path: Path) -> None:
    file = Checkpoint(write_gguf(tmp_path / "tiny.gguf"))
    assert file.tokenizer is not None
    write_folder(tmp_path)
    file.tokenizer._tokenizer.save_pretrained(tmp_path)
    again = Checkpoint(tmp_path).tokenizer
    assert again is not None
    assert again.encode("hello world") == file.tokenizer.encode("hello world")
    assert again.has_chat_template


def test_a_real_checkpoint_of_ones_own(tmp_path: Path) -> None:
    """MLX_AUDIT_CHECKPOINT names a folder or file of any size; without it the test looks at a tiny folder."""
    named = os.environ.get("MLX_AUDIT_CHECKPOINT")
    subject = subject_of(named or write_folder(tmp_path))
    results = {code: only(code, subject) for code in CODES}
    assert {result.status for result in results.values()} <= {"pass", "not-applicable"}, results
    assert results["CKP001"].status == "pass"
