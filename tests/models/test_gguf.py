"""GGUF files become mlx-lm's models and tokenizers, with the same numbers."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import gguf_files as gf
from mlx_audit.errors import TargetError
from mlx_audit.models.gguf import GGUFError, read_gguf
from tiny_models import tiny_model

TOKENS = mx.array([[5, 17, 200, 3, 9, 1, 40]])
QUANTIZED = {"attn": gf.KIND_Q4_1, "ffn": gf.KIND_Q4_1, "token_embd": gf.KIND_Q8_0}


def model_of(family: str, **changes: Any) -> nn.Module:
    return tiny_model(family, vocab_size=gf.VOCABULARY, **changes)


def write(folder: Path, draft: gf.Draft) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(draft.build())
    return path


def assert_close(got: mx.array, want: mx.array, tolerance: float = 1e-5) -> None:
    difference = mx.abs(got - want).max().item()
    assert difference <= tolerance * mx.abs(want).max().item(), difference


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_theta": 500000.0, "num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": False}),
    ],
)
def test_logits_equal_the_model_that_was_written(tmp_path: Path, family: str, changes: Any) -> None:
    model = model_of(family, **changes)
    checkpoint = read_gguf(write(tmp_path, gf.draft_of(model)))
    assert checkpoint.architecture == family
    assert "quantization" not in checkpoint.config
    assert_close(checkpoint.load_model()(TOKENS), model(TOKENS))


def test_rope_is_told_apart(tmp_path: Path) -> None:
    model = model_of("llama")
    checkpoint = read_gguf(write(tmp_path, gf.draft_of(model)))
    assert checkpoint.config["rope_traditional"] is True
    checkpoint.config["rope_traditional"] = False
    with pytest.raises(AssertionError):
        assert_close(checkpoint.load_model()(TOKENS), model(TOKENS))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantized_modules_keep_their_own_bits(tmp_path: Path, family: str) -> None:
    draft = gf.draft_of(model_of(family), QUANTIZED)
    checkpoint = read_gguf(write(tmp_path, draft))
    assert checkpoint.config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        **({"lm_head": False} if family == "llama" else {}),
    }
    model: Any = checkpoint.load_model()
    assert model.model.embed_tokens.bits == 8
    assert model.model.layers[0].self_attn.q_proj.bits == 4

    plain = gf.draft_of(model_of(family))
    for name, (shape, kind, data) in draft.tensors.items():
        if kind != gf.KIND_F32:
            plain.tensors[name] = [shape, gf.KIND_F32, gf.decode(data, kind).astype("<f4").tobytes()]
    dense = read_gguf(write(tmp_path, plain)).load_model()
    assert_close(model(TOKENS), dense(TOKENS), 1e-4)


def test_mlx_lm_loads_a_folder_made_of_it(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    draft = gf.draft_of(model_of("qwen2"), {"attn_q": gf.KIND_Q4_1, "token_embd": gf.KIND_Q8_0})
    checkpoint = read_gguf(write(tmp_path, draft))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), checkpoint.load_weights())
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    model, _ = load_model(tmp_path)
    assert mx.array_equal(model(TOKENS), checkpoint.load_model()(TOKENS))


def test_dtype_and_laziness(tmp_path: Path) -> None:
    checkpoint = read_gguf(write(tmp_path, gf.draft_of(model_of("llama"), {"ffn_down": gf.KIND_F16})))
    assert checkpoint.load_model(lazy=True)(TOKENS).dtype == mx.float32
    assert checkpoint.load_model(dtype="float16")(TOKENS).dtype == mx.float16
    with pytest.raises(TargetError, match="unknown dtype"):
        checkpoint.load_model(dtype="int8")


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 64), (3, 8), (3, 4096)])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    model = model_of("qwen2")
    draft = gf.draft_of(model)
    draft.version, draft.alignment = version, alignment
    draft.metadata["general.alignment"] = gf.u32(alignment)
    assert mx.array_equal(read_gguf(write(tmp_path, draft)).load_model()(TOKENS), model(TOKENS))


def test_a_file_that_may_not_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2")
    path = write(tmp_path, gf.draft_of(model))
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anything
    try:
        assert mx.array_equal(read_gguf(path).load_model()(TOKENS), model(TOKENS))
    finally:
        tmp_path.chmod(0o755)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    draft = gf.draft_of(model_of("llama"))
    checkpoint = read_gguf(write(tmp_path, draft))
    write(tmp_path, gf.Draft())
    with pytest.raises(GGUFError, match="changed since its header was read"):
        checkpoint.load_model()
    checkpoint.path.unlink()
    with pytest.raises(GGUFError, match="MLX cannot read"):
        checkpoint.load_model()


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = model_of("llama", rope_scaling={"type": "linear", "factor": 4.0})
    draft = gf.draft_of(model)
    draft.metadata["llama.rope.scaling.type"] = gf.string("linear")
    draft.metadata["llama.rope.scaling.factor"] = gf.f32(4.0)
    assert_close(read_gguf(write(tmp_path, draft)).load_model()(TOKENS), model(TOKENS))


def test_metadata_are_plain_and_short(tmp_path: Path) -> None:
    draft = gf.draft_of(model_of("llama"))
    draft.metadata["general.languages"] = gf.strings(["en", "fr"])
    draft.metadata["general.flags"] = gf.array(gf.BOOL, 2, b"\1\0")
    metadata = read_gguf(write(tmp_path, draft)).metadata
    assert metadata["general.languages"] == ["en", "fr"]
    assert metadata["general.flags"] == [True, False]
    assert metadata["llama.embedding_length"] == 32
    assert metadata["tokenizer.ggml.tokens"]["count"] == gf.VOCABULARY
    assert len(json.dumps(metadata)) < 4000


TEXTS = [
    "hello world",
    "Hello,  12345 it's\n\n\tİ",
    "naïve 日本語 🙂",
    " ",
    "",
    "x" * 300,
    "He'LL say: \r\n no",
]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_tokenizers_round_trip(tmp_path: Path, pre: str) -> None:
    draft = gf.draft_of(model_of("llama"))
    draft.metadata |= gf.byte_vocabulary(pre)
    tokenizer = read_gguf(write(tmp_path, draft)).load_tokenizer()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        text = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.decode(ids) == text
        detokenizer = tokenizer.detokenizer
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text.removeprefix(" ")  # mlx-lm's detokenizer drops a leading space
    with_bos = tokenizer.encode("hello")
    assert with_bos == ([1] if pre == "llama-bpe" else []) + [tokenizer.convert_tokens_to_ids("hello")]


def test_chat_template_and_stop_tokens(tmp_path: Path) -> None:
    tokenizer = read_gguf(write(tmp_path, gf.draft_of(model_of("llama")))).load_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n"
    assert ids[0] == 1
    assert ids[-2] == 2
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhello\n"


def test_digits_stand_alone_where_the_file_says_so(tmp_path: Path) -> None:
    draft = gf.draft_of(model_of("llama"))
    tokens = [*gf.SPECIAL, *gf.byte_tokens(), *(m.replace(" ", "") for m in gf.MERGES[:-1]), "12"]
    draft.metadata["tokenizer.ggml.tokens"] = gf.strings(tokens)
    draft.metadata["tokenizer.ggml.merges"] = gf.strings([*gf.MERGES[:-1], "1 2"])
    assert len(read_gguf(write(tmp_path, draft)).load_tokenizer().encode("12")) == 2
    draft.metadata["tokenizer.ggml.pre"] = gf.string("gpt-2")
    assert len(read_gguf(write(tmp_path, draft)).load_tokenizer().encode("12")) == 1


def test_sentencepiece_scores_give_sentencepiece_tokens(tmp_path: Path) -> None:
    import sentencepiece

    words = "the quick brown fox jumps over the lazy dog while other foxes watch there then brother"
    corpus = tmp_path / "corpus.txt"
    rows = np.random.default_rng(0).permuted(np.array([words.split()] * 200), axis=1)
    corpus.write_text("\n".join(" ".join(row) for row in rows))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )
    spm = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = spm.get_piece_size()
    types = [
        2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1
        for i in range(size)
    ]
    draft = gf.draft_of(tiny_model("llama", vocab_size=size))
    draft.metadata = {k: v for k, v in draft.metadata.items() if not k.startswith("tokenizer.")} | {
        "tokenizer.ggml.model": gf.string("llama"),
        "tokenizer.ggml.tokens": gf.strings([spm.id_to_piece(i) for i in range(size)]),
        "tokenizer.ggml.scores": gf.floats([spm.get_score(i) for i in range(size)]),
        "tokenizer.ggml.token_type": gf.ints(types),
        "tokenizer.ggml.bos_token_id": gf.u32(spm.bos_id()),
        "tokenizer.ggml.eos_token_id": gf.u32(spm.eos_id()),
        "tokenizer.ggml.unknown_token_id": gf.u32(spm.unk_id()),
    }
    tokenizer = read_gguf(write(tmp_path, draft)).load_tokenizer()
    for text in ["the quick brown fox", "brothers and foxes  over", "naïve 日本 🙂", "thethethe", "a"]:
        ids = tokenizer.encode(text)
        assert ids == [spm.bos_id(), *spm.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        detokenizer = tokenizer.detokenizer
        for token in ids[1:]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text
    assert tokenizer.eos_token_ids == {spm.eos_id()}
