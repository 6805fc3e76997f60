# A made-up family for docs/onboarding.md: two layers with a recurrent state, then one with a sliding window.

from dataclasses import dataclass
from typing import Any, List, Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .base import (
    BaseModelArgs,
    create_attention_mask,
    create_ssm_mask,
    scaled_dot_product_attention,
)
from .cache import ArraysCache, RotatingKVCache


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    sliding_window: int
    layer_types: List[str]
    rope_theta: float = 10000.0


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_heads = args.num_attention_heads
        self.n_kv_heads = args.num_key_value_heads
        self.scale = args.head_dim**-0.5

        dim, head_dim = args.hidden_size, args.head_dim
        self.q_proj = nn.Linear(dim, self.n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * head_dim, dim, bias=False)
        self.rope = nn.RoPE(head_dim, traditional=False, base=args.rope_theta)

    def __call__(
        self,
        x: mx.array,
        mask: Optional[mx.array] = None,
        cache: Optional[Any] = None,
    ) -> mx.array:
        B, L, _ = x.shape
        queries = self.q_proj(x).reshape(B, L, self.n_heads, -1).transpose(0, 2, 1, 3)
        keys = self.k_proj(x).reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1)
        values = values.transpose(0, 2, 1, 3)

        if cache is not None:
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values)
        else:
            queries = self.rope(queries)
            keys = self.rope(keys)

        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
        return self.o_proj(output)


class Recurrence(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.in_proj = nn.Linear(args.hidden_size, args.hidden_size, bias=False)
        self.gate = nn.Linear(args.hidden_size, args.hidden_size, bias=False)
        self.out_proj = nn.Linear(args.hidden_size, args.hidden_size, bias=False)

    def __call__(
        self,
        x: mx.array,
        mask: Optional[mx.array] = None,
        cache: Optional[Any] = None,
    ) -> mx.array:
        decay = mx.sigmoid(self.gate(x))
        inputs = (1 - decay) * self.in_proj(x)
        if mask is not None:
            decay = mx.where(mask[..., None], decay, 1)
            inputs = mx.where(mask[..., None], inputs, 0)

        state = cache[0] if cache is not None else None
        if state is None:
            state = mx.zeros_like(inputs[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + inputs[:, t]
            outputs.append(state)
        if cache is not None:
            cache[0] = state
            cache.advance(x.shape[1])
        return self.out_proj(mx.stack(outputs, axis=1))


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim, hidden_dim = args.hidden_size, args.intermediate_size
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs, layer_type: str):
        super().__init__()
        self.is_recurrent = layer_type == "linear_attention"
        self.mixer = Recurrence(args) if self.is_recurrent else Attention(args)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(
            args.hidden_size, eps=args.rms_norm_eps
        )

    def __call__(
        self,
        x: mx.array,
        mask: Optional[mx.array] = None,
        cache: Optional[Any] = None,
    ) -> mx.array:
        h = x + self.mixer(self.input_layernorm(x), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class MartenModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.embed_positions = nn.Embedding(
            args.max_position_embeddings, args.hidden_size
        )
        self.layers = [DecoderLayer(args, kind) for kind in args.layer_types]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.rec_idx = args.layer_types.index("linear_attention")
        self.attn_idx = args.layer_types.index("sliding_attention")
        self.window_size = args.sliding_window

    def __call__(self, inputs: mx.array, cache=None) -> mx.array:
        h = self.embed_tokens(inputs)
        L = inputs.shape[1]
        if cache is None:
            cache = [None] * len(self.layers)

        offset = 0
        if cache[self.attn_idx] is not None:
            offset = cache[self.attn_idx].offset
        positions = mx.array(np.arange(offset, offset + L))
        h = h + self.embed_positions(positions)

        rec_mask = create_ssm_mask(h, cache[self.rec_idx])
        mask = create_attention_mask(
            h, cache[self.attn_idx], window_size=self.window_size
        )
        for layer, c in zip(self.layers, cache):
            h = layer(h, rec_mask if layer.is_recurrent else mask, c)
        return self.norm(h)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = MartenModel(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache=None) -> mx.array:
        return self.lm_head(self.model(inputs, cache))

    @property
    def layers(self):
        return self.model.layers

    def make_cache(self):
        return [
            (
                ArraysCache(size=1)
                if layer.is_recurrent
                else RotatingKVCache(max_size=self.args.sliding_window)
            )
            for layer in self.layers
        ]
