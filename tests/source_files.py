"""Small model files for the source audit: a plain decoder with places to put a mistake into."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent, indent

from mlx_audit.source import SourceReport, read_source

_DECODER = """\
import functools
import logging
import math
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention
from .cache import ArraysCache, KVCache
from .rope_utils import initialize_rope


@dataclass
class ModelArgs(BaseModelArgs):
    hidden_size: int = 64
    heads: int = 4
    layers: int = 2
    window: Optional[int] = None


{top}


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.heads = args.heads
        self.scale = (args.hidden_size // args.heads) ** -0.5
        self.qkv = nn.Linear(args.hidden_size, 3 * args.hidden_size)
        self.o_proj = nn.Linear(args.hidden_size, args.hidden_size)
        self.rope = nn.RoPE(args.hidden_size // args.heads)
{attention_init}

    def __call__(self, x, mask=None, cache=None):
        B, L, D = x.shape
        q, k, v = mx.split(self.qkv(x), 3, axis=-1)
        q = q.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
        k = k.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
        v = v.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
        q = self.rope(q, offset=cache.offset)
        k = self.rope(k, offset=cache.offset)
        offset = cache.offset
        keys, values = cache.update_and_fetch(k, v)
{attention}
        out = scaled_dot_product_attention(q, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))


class Block(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.self_attn = Attention(args)

    def __call__(self, x, mask=None, cache=None):
        return x + self.self_attn(x, mask, cache)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(100, args.hidden_size)
        self.layers = [Block(args) for _ in range(args.layers)]
        self.head = nn.Linear(args.hidden_size, 100)
{model_init}

    def __call__(self, inputs, cache=None):
        h = self.embed(inputs)
        B, L = inputs.shape
        if cache is None:
            cache = [None] * len(self.layers)
        mask = create_attention_mask(h, cache[0])
        offset = cache[0].offset
{model}
        for layer, c in zip(self.layers, cache):
            h = layer(h, mask, cache=c)
        return self.head(h)
{methods}
"""

_MARK = re.compile(r"#! (SRC\d+)(?: when (.*))?$")


def decoder(
    model: str = "",
    attention: str = "",
    top: str = "",
    model_init: str = "",
    attention_init: str = "",
    methods: str = "",
) -> str:
    """Return the source of a plain decoder with code put into it."""
    return _DECODER.format(
        top=dedent(top),
        attention_init=indent(dedent(attention_init), 8 * " "),
        attention=indent(dedent(attention), 8 * " "),
        model_init=indent(dedent(model_init), 8 * " "),
        model=indent(dedent(model), 8 * " "),
        methods=indent(dedent(methods), 4 * " "),
    )


def read(folder: Path, source: str) -> SourceReport:
    """Write a source to a file, and read it."""
    file = folder / "audited.py"
    file.write_text(source, encoding="utf-8")
    return read_source(file)


def marked(source: str) -> list[tuple[int, str, str]]:
    """Return the hazards that a source marks: line, code, condition."""
    lines = enumerate(source.splitlines(), 1)
    return [(number, m[1], m[2] or "") for number, line in lines for m in [_MARK.search(line)] if m]


def hazards(report: SourceReport) -> list[tuple[int, str, str]]:
    """Return the hazards of a report in the same form, each line and code once."""
    return sorted({(hazard.line, hazard.code, hazard.when) for hazard in report.hazards})
