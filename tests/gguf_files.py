"""A tiny writer of GGUF files, valid and otherwise: what the GGUF tests read."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 12
KIND_F32, KIND_F16, KIND_Q4_0, KIND_Q4_1, KIND_Q8_0 = 0, 1, 2, 3, 8
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> tuple[int, bytes]:
    return U32, struct.pack("<I", value)


def f32(value: float) -> tuple[int, bytes]:
    return F32, struct.pack("<f", value)


def flag(value: bool) -> tuple[int, bytes]:
    return BOOL, bytes([value])


def string(value: str | bytes) -> tuple[int, bytes]:
    return STRING, text(value)


def array(kind: int, count: int, data: bytes) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", kind, count) + data


def strings(values: list[str]) -> tuple[int, bytes]:
    return array(STRING, len(values), b"".join(text(value) for value in values))


def ints(values: list[int]) -> tuple[int, bytes]:
    return array(I32, len(values), np.array(values, "<i4").tobytes())


def floats(values: list[float]) -> tuple[int, bytes]:
    return array(F32, len(values), np.array(values, "<f4").tobytes())


@dataclass
class Draft:
    """A GGUF file to be: metadata as (type, bytes) by key, tensors as [ggml shape, kind, data] by name."""

    metadata: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    counts: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    more_metadata: bytes = b""
    more_tensors: bytes = b""
    marks: list[int] = field(default_factory=list)

    def build(self) -> bytes:
        """Return the file; `marks` then holds where each part of the header ends."""
        out = self.magic
        marks = [len(out)]

        def add(part: bytes) -> None:
            nonlocal out
            out += part
            marks.append(len(out))

        add(struct.pack("<I", self.version))
        add(struct.pack("<Q", self.counts.get("tensors", len(self.tensors))))
        add(struct.pack("<Q", self.counts.get("metadata", len(self.metadata))))
        for key, (kind, value) in self.metadata.items():
            add(text(key))
            add(struct.pack("<I", kind))
            add(value)
        add(self.more_metadata)
        offset, blobs = 0, []
        for name, (shape, kind, data) in self.tensors.items():
            add(text(name))
            add(struct.pack("<I", len(shape)))
            add(struct.pack(f"<{len(shape)}Q", *shape))
            add(struct.pack("<I", kind))
            add(struct.pack("<Q", self.offsets.get(name, offset)))
            blobs.append((offset, data))
            offset = -(-(offset + len(data)) // self.alignment) * self.alignment
        add(self.more_tensors)
        out += b"\0" * (-len(out) % self.alignment)
        start = len(out)
        for at, data in blobs:
            out += b"\0" * (start + at - len(out)) + data
        self.marks = sorted(set(marks))
        return out


def byte_tokens() -> list[str]:
    """Return GPT-2's 256 characters, one a byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_vocabulary(pre: str = "smollm") -> dict[str, tuple[int, bytes]]:
    """Return the metadata of a small byte-level tokenizer."""
    tokens = [*SPECIAL, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(pre),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": ints([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))),
        "tokenizer.ggml.merges": strings(MERGES),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.chat_template": string(TEMPLATE),
    }


VOCABULARY = len(SPECIAL) + 256 + len(MERGES)

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def draft_of(model: nn.Module, kinds: dict[str, int] | None = None) -> Draft:
    """Return a mlx-lm model as llama.cpp's converter would write it.

    Args:
        model: A llama or qwen2 model with default RoPE.
        kinds: Encoding by a part of the tensor's name; float32 elsewhere.
    """
    args = model.args
    family = args.model_type
    metadata = {
        "general.architecture": string(family),
        f"{family}.context_length": u32(args.max_position_embeddings),
        f"{family}.embedding_length": u32(args.hidden_size),
        f"{family}.block_count": u32(args.num_hidden_layers),
        f"{family}.feed_forward_length": u32(args.intermediate_size),
        f"{family}.attention.head_count": u32(args.num_attention_heads),
        f"{family}.attention.head_count_kv": u32(args.num_key_value_heads),
        f"{family}.attention.layer_norm_rms_epsilon": f32(args.rms_norm_eps),
        f"{family}.rope.freq_base": f32(args.rope_theta),
        **byte_vocabulary(),
    }
    tensors = {}
    for name, value in tree_flatten(model.parameters()):
        weights = np.array(value.astype(mx.float32))
        stem, part = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        target = _NAMES[stem]
        if family == "llama" and target in ("attn_q", "attn_k"):
            heads = args.num_attention_heads if target == "attn_q" else args.num_key_value_heads
            weights = interleave(weights, heads)
        kind = next(
            (k for piece, k in (kinds or {}).items() if piece in target and weights.ndim == 2), KIND_F32
        )
        shape = list(reversed(weights.shape))
        tensors[f"{prefix}{target}.{part}"] = [shape, kind, encode(weights, kind)]
    return Draft(metadata, tensors)


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return rows reordered, as llama.cpp's converter does for q and k: the halves of each head alternate."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def encode(weights: np.ndarray, kind: int) -> bytes:
    """Return numbers as ggml stores them."""
    if kind == KIND_F32:
        return weights.astype("<f4").tobytes()
    if kind == KIND_F16:
        return weights.astype("<f2").tobytes()
    blocks = weights.reshape(-1, 32)
    if kind == KIND_Q8_0:
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        numbers = np.round(blocks / scale.astype("f4")).astype("i1")
        return b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, numbers, strict=True))
    assert kind == KIND_Q4_1
    low = blocks.min(1, keepdims=True).astype("<f2")
    scale = ((blocks.max(1, keepdims=True) - low) / 15).astype("<f2")
    numbers = np.clip(np.round((blocks - low) / scale.astype("f4")), 0, 15).astype("u1")
    packed = numbers[:, :16] | (numbers[:, 16:] << 4)
    return b"".join(
        s.tobytes() + m.tobytes() + q.tobytes() for s, m, q in zip(scale, low, packed, strict=True)
    )


def decode(data: bytes, kind: int) -> np.ndarray:
    """Return the numbers that `encode` stored, computed apart from MLX."""
    if kind == KIND_Q8_0:
        blocks = np.frombuffer(data, np.dtype([("s", "<f2"), ("q", "i1", 32)]))
        return (blocks["s"][:, None].astype("f4") * blocks["q"]).ravel()
    assert kind == KIND_Q4_1
    blocks = np.frombuffer(data, np.dtype([("s", "<f2"), ("m", "<f2"), ("q", "u1", 16)]))
    numbers = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    return (blocks["s"][:, None].astype("f4") * numbers + blocks["m"][:, None].astype("f4")).ravel()
