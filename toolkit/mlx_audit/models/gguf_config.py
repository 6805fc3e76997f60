"""From the metadata of a GGUF file to an mlx-lm configuration, and the tensors that must then be in the file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_audit.models.gguf_format import GGUFError, Header, Items, shorten

ARCHITECTURES = ("llama", "qwen2")
GROUP = 32
LIMIT = 1 << 20
"""No width, count of layers or heads comes near this; it keeps products small."""

_KNOWN = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}
_OTHER_MODEL = "only plain llama and qwen2 models are built"


@dataclass(frozen=True)
class Wanted:
    """A tensor that the model needs.

    Attributes:
        target: mlx-lm's name of the parameter.
        shape: In ggml's order.
        matrix: Whether it may be quantized.
    """

    target: str
    shape: tuple[int, ...]
    matrix: bool = False


class Facts:
    """Reads typed values out of a header; a wrong one is an error that names its key."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = LIMIT) -> int:
        """Return a whole number within bounds."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"a whole number, {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number, as short as float32 tells it."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a positive float32")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "a bool")
        return value

    def items(self, key: str, kind: str, count: int | None = None) -> list[Any]:
        """Return an array that is kept whole."""
        value = self._get(key, None)
        if not isinstance(value, Items) or value.values is None or value.kind != kind:
            raise self._wrong(key, value, f"an array of {kind}")
        if count is not None and value.count != count:
            raise self._wrong(key, value.count, f"{count} items, one a token")
        return value.values

    def has(self, key: str) -> bool:
        """Return whether the file has this key."""
        return key in self.header.values

    def _get(self, key: str, default: Any) -> Any:
        value = self.header.values.get(key, default)
        if value is None:
            raise self.header.error("a metadata key is missing", key)
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> GGUFError:
        found = (
            f"an array of {value.count} {value.kind}" if isinstance(value, Items) else shorten(repr(value))
        )
        return self.header.error("wrong value", key, found=found, allowed=allowed)


def config_of(header: Header) -> dict[str, Any]:
    """Return the mlx-lm configuration that the metadata describe, without `quantization`.

    Raises:
        GGUFError: a value is missing, wrong, contradicts another one, or has no counterpart in mlx-lm.
    """
    facts = Facts(header)
    architecture = _architecture(facts)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    hidden = facts.whole(key("embedding_length"))
    heads = facts.whole(key("attention.head_count"))
    kv_heads = facts.whole(key("attention.head_count_kv"), heads)
    if heads % kv_heads:
        raise header.error(
            "the query heads don't share the key heads evenly",
            key("attention.head_count_kv"),
            found=kv_heads,
            allowed=f"a divisor of {heads}",
        )
    own_width = architecture == "llama" and facts.has(key("attention.key_length"))
    if hidden % heads and not own_width:
        raise header.error(
            "the heads don't divide the width",
            key("attention.head_count"),
            found=heads,
            allowed=f"a divisor of {hidden}",
        )
    head = facts.whole(key("attention.key_length"), hidden // heads)
    _must_be(facts, key("attention.value_length"), head)
    _must_be(facts, key("rope.dimension_count"), head)
    if head % 2 or (architecture == "qwen2" and head != hidden // heads):
        raise header.error(
            "wrong head width", key("attention.key_length"), found=head, allowed=f"{hidden // heads}, even"
        )
    vocabulary = len(facts.items("tokenizer.ggml.tokens", "string"))
    _must_be(facts, key("vocab_size"), vocabulary)
    config: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[architecture]],
        "hidden_size": hidden,
        "num_hidden_layers": facts.whole(key("block_count"), high=len(header.tensors)),
        "intermediate_size": facts.whole(key("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": facts.number(key("attention.layer_norm_rms_epsilon")),
        "vocab_size": vocabulary,
        "max_position_embeddings": facts.whole(key("context_length"), high=1 << 30),
        "rope_theta": facts.number(key("rope.freq_base"), 10_000.0),
        # llama.cpp permutes the rows of q and k of its llama architecture, for RoPE over neighbouring pairs.
        "rope_traditional": architecture == "llama",
        "rope_scaling": _rope_scaling(facts, architecture),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float16",
    }
    if architecture == "llama":
        config |= {
            "head_dim": head,
            "attention_bias": "blk.0.attn_q.bias" in header.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        }
    for name in ("bos", "eos"):
        if facts.has(id_key := f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = facts.whole(id_key, low=0, high=vocabulary - 1)
    return config


def wanted_tensors(config: dict[str, Any]) -> dict[str, Wanted]:
    """Return the tensors that a model of this configuration needs, by name in the file."""
    hidden, inner, vocabulary = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    qwen2 = config["model_type"] == "qwen2"
    bias, mlp_bias = qwen2 or config["attention_bias"], config.get("mlp_bias", False)
    linear = [
        ("attn_q", "self_attn.q_proj", hidden, heads * head, bias),
        ("attn_k", "self_attn.k_proj", hidden, kv_heads * head, bias),
        ("attn_v", "self_attn.v_proj", hidden, kv_heads * head, bias),
        ("attn_output", "self_attn.o_proj", heads * head, hidden, bias and not qwen2),
        ("ffn_gate", "mlp.gate_proj", hidden, inner, mlp_bias),
        ("ffn_up", "mlp.up_proj", hidden, inner, mlp_bias),
        ("ffn_down", "mlp.down_proj", inner, hidden, mlp_bias),
    ]
    wanted = {
        "token_embd.weight": Wanted("model.embed_tokens.weight", (hidden, vocabulary), matrix=True),
        "output_norm.weight": Wanted("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = Wanted("lm_head.weight", (hidden, vocabulary), matrix=True)
    for layer in range(config["num_hidden_layers"]):
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        for name, norm in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            wanted[f"{source}.{name}.weight"] = Wanted(f"{target}.{norm}.weight", (hidden,))
        for name, module, ins, outs, biased in linear:
            wanted[f"{source}.{name}.weight"] = Wanted(f"{target}.{module}.weight", (ins, outs), matrix=True)
            if biased:
                wanted[f"{source}.{name}.bias"] = Wanted(f"{target}.{module}.bias", (outs,))
    return wanted


def check_tensors(header: Header, wanted: dict[str, Wanted]) -> None:
    """Refuse a file that lacks a tensor, or has one too many or of another shape or kind.

    Raises:
        GGUFError: names the first such tensor.
    """
    for name, want in wanted.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise header.error("a tensor is missing", name, allowed=f"shape {list(want.shape)}")
        if tensor.shape != want.shape:
            raise header.error(
                "a tensor's shape contradicts the metadata",
                name,
                found=list(tensor.shape),
                allowed=list(want.shape),
            )
        if tensor.encoding.block > 1 and not want.matrix:
            raise header.error("quantized", name, found=tensor.encoding.name, allowed="F32 or F16")
    for name in header.tensors:
        if name not in wanted:
            raise header.error("a tensor has no place in the model", name, fix=_OTHER_MODEL)


def _architecture(facts: Facts) -> str:
    name = facts.text("general.architecture")
    if name not in ARCHITECTURES:
        raise facts.header.error(
            "unknown architecture",
            "general.architecture",
            found=shorten(name),
            allowed=", ".join(ARCHITECTURES),
            fix=_OTHER_MODEL,
        )
    if facts.whole("split.count", 1, low=0) > 1:
        raise facts.header.error(
            "one part of several", "split.count", fix="join the parts with llama-gguf-split --merge"
        )
    _must_be(facts, "general.type", "model")
    _must_be(facts, f"{name}.expert_count", 0)
    _must_be(facts, f"{name}.attention.causal", True)
    for key in facts.header.values:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in _KNOWN:
            raise facts.header.error("a setting that mlx-lm's model does not have", key, fix=_OTHER_MODEL)
    return name


def _must_be(facts: Facts, key: str, wanted: str | int) -> None:
    found = facts.header.values.get(key, wanted)
    if type(found) is not type(wanted) or found != wanted:
        shown = found.count if isinstance(found, Items) else shorten(repr(found))
        raise facts.header.error("contradicts the rest of the file", key, found=shown, allowed=repr(wanted))


def _rope_scaling(facts: Facts, architecture: str) -> dict[str, Any] | None:
    kind_key = f"{architecture}.rope.scaling.type"
    kind = facts.text(kind_key, "none")
    if kind not in ("none", "linear"):
        raise facts.header.error(
            "a kind of RoPE scaling that is not read", kind_key, found=shorten(kind), allowed="none, linear"
        )
    if "rope_freqs.weight" in facts.header.tensors:
        raise facts.header.error("RoPE factors are not read", "rope_freqs.weight", fix=_OTHER_MODEL)
    factor_key = f"{architecture}.rope.scaling.factor"
    return {"type": "linear", "factor": facts.number(factor_key)} if kind == "linear" else None
