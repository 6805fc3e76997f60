"""`mlx_audit.load`: a folder or a GGUF file, whatever it is called; and errors that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlx_audit
from hf_folders import write_hf
from mlx_audit.errors import TargetError
from mlx_audit.models.origins import folder_of
from real_checkpoints import write_gguf


def test_a_folder_named_like_a_family_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "llama", "qwen2")
    monkeypatch.chdir(tmp_path)
    model, tokenizer = mlx_audit.load("llama")
    assert type(model).__module__ == "mlx_lm.models.qwen2"
    assert folder_of(model) == tmp_path / "llama"
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == {2}


def test_a_gguf_file_comes_from_no_folder(tmp_path: Path) -> None:
    model, tokenizer = mlx_audit.load(write_gguf(tmp_path / "tiny.gguf"))
    assert tokenizer is not None
    assert folder_of(model) is None


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such target"):
        mlx_audit.load(tmp_path / "nowhere")
    with pytest.raises(TargetError, match=r"no config\.json"):
        mlx_audit.load(tmp_path)
    (tmp_path / "model.py").write_text("")
    with pytest.raises(TargetError):
        mlx_audit.load(tmp_path / "model.py")
