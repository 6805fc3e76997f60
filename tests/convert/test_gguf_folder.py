"""A GGUF file as a folder: mlx-lm loads the same weights, ids, text and stop tokens; or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import gguf_files as gf
from mlx_audit.convert.gguf_folder import write_folder
from mlx_audit.convert.options import ConvertOptions
from mlx_audit.convert.order import ConversionFailed, Order
from mlx_audit.models.gguf import read_gguf
from real_checkpoints import write_gguf
from tiny_models import tiny_model

TEXT = "hello world <|im_start|>é\n 123 🙂"


def write_own(path: Path, family: str, kinds: dict[str, int] | None = None) -> Path:
    """Write a file whose text is cut as the family's tokenizer cuts it."""
    draft = gf.draft_of(tiny_model(family, vocab_size=gf.VOCABULARY), kinds)
    draft.metadata |= gf.byte_vocabulary("qwen2" if family == "qwen2" else "smollm")
    path.write_bytes(draft.build())
    return path


def order(source: Path, made: Path, **options: Any) -> Order:
    return Order(text="x.gguf", work="gguf", source=source, made=made, options=ConvertOptions(**options))


@pytest.mark.parametrize(
    "kinds", [None, {"ffn": gf.KIND_Q4_1, "attn_q": gf.KIND_Q8_0}], ids=["float32", "mixed"]
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_mlx_lm_loads_what_the_file_holds(tmp_path: Path, family: str, kinds: dict[str, int] | None) -> None:
    source = write_own(tmp_path / "tiny.gguf", family, kinds)
    assert write_folder(order(source, tmp_path / "made")) == []
    model, tokenizer = mlx_lm.load(str(tmp_path / "made"))
    checkpoint = read_gguf(source)
    theirs = checkpoint.load_tokenizer()
    stored, wanted = (dict(tree_flatten(m.parameters())) for m in (model, checkpoint.load_model()))
    assert stored.keys() == wanted.keys()
    for name, array in wanted.items():
        assert stored[name].dtype == array.dtype
        assert mx.array_equal(stored[name], array), name
    assert list(tokenizer.encode(TEXT)) == list(theirs.encode(TEXT))
    assert tokenizer.eos_token_ids == theirs.eos_token_ids == {0, 2}
    chat = [{"role": "user", "content": TEXT}]
    assert tokenizer.apply_chat_template(chat) == theirs.apply_chat_template(chat)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"quantize": True, "q_group_size": 32}, 4),
        ({"quantize": True, "q_group_size": 32, "q_bits": 8, "dtype": "bfloat16"}, 8),
        ({"dequantize": True}, None),
        ({"dequantize": True, "dtype": "float16"}, None),
    ],
    ids=["4 bits", "8 bits", "none", "none, half"],
)
def test_weights_are_quantized_anew_or_no_more(
    tmp_path: Path, options: dict[str, Any], bits: int | None
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama", {"ffn": gf.KIND_Q4_1})
    notes = write_folder(order(source, tmp_path / "made", **options))
    config = json.loads((tmp_path / "made" / "config.json").read_text(encoding="utf-8"))
    assert config.get("quantization", {}).get("bits") == bits
    assert notes == (["the file's weights were quantized already: they are rounded twice"] if bits else [])
    model, _ = mlx_lm.load(str(tmp_path / "made"))
    dtype = {"bfloat16": mx.bfloat16, "float16": mx.float16}.get(options.get("dtype", ""), mx.float32)
    assert model.model.norm.weight.dtype == dtype
    ids = mx.array([[3, 4, 5, 6]])
    got, want = model(ids).astype(mx.float32), read_gguf(source).load_model()(ids)
    near = mx.abs(got - want).max() / mx.abs(want).max()
    assert near.item() < (0.5 if bits == 4 else 0.05)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "starcoder"])
def test_tokenizers_of_all_kinds_round_trip(tmp_path: Path, pre: str) -> None:
    draft = gf.draft_of(tiny_model("llama", vocab_size=gf.VOCABULARY))
    draft.metadata |= gf.byte_vocabulary(pre)
    draft.metadata["tokenizer.ggml.add_bos_token"] = gf.flag(True)
    (tmp_path / "x.gguf").write_bytes(draft.build())
    write_folder(order(tmp_path / "x.gguf", tmp_path / "made"))
    _, tokenizer = mlx_lm.load(str(tmp_path / "made"))
    assert tokenizer.encode("hello 123")[0] == 1


def test_sentencepiece_round_trips(tmp_path: Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"helowrd",
        "he",
        "ll",
        "▁w",
    ]
    draft = gf.draft_of(tiny_model("llama", vocab_size=len(pieces)))
    draft.metadata = {k: v for k, v in draft.metadata.items() if not k.startswith("tokenizer.")} | {
        "tokenizer.ggml.model": gf.string("llama"),
        "tokenizer.ggml.tokens": gf.strings(pieces),
        "tokenizer.ggml.scores": gf.floats([-float(at) for at in range(len(pieces))]),
        "tokenizer.ggml.token_type": gf.ints([2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]),
        "tokenizer.ggml.bos_token_id": gf.u32(1),
        "tokenizer.ggml.eos_token_id": gf.u32(2),
        "tokenizer.ggml.unknown_token_id": gf.u32(0),
    }
    (tmp_path / "x.gguf").write_bytes(draft.build())
    write_folder(order(tmp_path / "x.gguf", tmp_path / "made"))
    _, tokenizer = mlx_lm.load(str(tmp_path / "made"))
    theirs = read_gguf(tmp_path / "x.gguf").load_tokenizer()
    assert list(tokenizer.encode(TEXT)) == list(theirs.encode(TEXT))
    assert tokenizer.encode("hello")[:2] == [1, pieces.index("▁")]
    assert tokenizer.eos_token_ids == {2}


def test_a_family_whose_tokenizer_the_library_replaces_is_refused(tmp_path: Path) -> None:
    # For qwen2, transformers cuts text in its own way, whatever tokenizer.json says.
    with pytest.raises(ConversionFailed, match="mlx-lm reads how texts are cut of the folder otherwise"):
        write_folder(order(write_gguf(tmp_path / "x.gguf", "qwen2"), tmp_path / "made"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda folder, data: data["model"]["merges"].pop(0), "the ids of texts"),
        (lambda folder, data: data.update(pre_tokenizer=None), "how texts are cut"),
        (lambda folder, data: data.update(normalizer={"type": "Lowercase"}), "how texts are cut"),
        (
            lambda folder, data: (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
            "the chat template",
        ),
        (lambda folder, data: _stop_at(folder, 7), "the stop tokens"),
    ],
    ids=["merge", "split", "case", "template", "stop"],
)
def test_a_tokenizer_that_would_be_read_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, what: str
) -> None:
    from mlx_audit.convert import gguf_folder

    def spoil(folder: Path) -> None:
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(folder, data)
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")

    monkeypatch.setattr(gguf_folder, "require_loads", spoil)
    source = write_own(tmp_path / "tiny.gguf", "llama")
    with pytest.raises(ConversionFailed, match=f"mlx-lm reads {what} of the folder otherwise"):
        write_folder(order(source, tmp_path / "made"))


def _stop_at(folder: Path, token: int) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": token}), encoding="utf-8")
