"""Mutated copies of mlx-lm's llama: each is a mistake that a port could make, as pieces of source to replace."""

from __future__ import annotations

Changes = tuple[tuple[str, str], ...]

_UPDATE = "            keys, values = cache.update_and_fetch(keys, values)\n"
_ROTATE = (
    "            queries = self.rope(queries, offset=cache.offset)\n"
    "            keys = self.rope(keys, offset=cache.offset)\n"
)
_ATTEND = """        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
"""
_NORM = "        return self.norm(h)\n"
_FULL_MASK = "        fa_mask = create_attention_mask(h, cache[self.fa_idx])\n"
_LAYERS = "        for layer, cache in zip(self.layers, cache):\n"
_INIT = "        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)\n"
_UP = "        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))\n"
_MLP_INIT = "        self.up_proj = nn.Linear(dim, hidden_dim, bias=mlp_bias)\n"


def _own_attention(masked: str) -> tuple[str, str]:
    """Return attention written out, with `masked` in the place of the mask."""
    return (
        _ATTEND,
        f"""        groups = self.n_heads // self.n_kv_heads
        keys, values = mx.repeat(keys, groups, 1), mx.repeat(values, groups, 1)
        scores = (queries * self.scale) @ keys.swapaxes(-1, -2)
        if isinstance(mask, str):
            mask = mx.arange(L)[:, None] + (keys.shape[2] - L) >= mx.arange(keys.shape[2])
{masked}
        output = mx.softmax(scores, axis=-1) @ values
""",
    )


MUTATIONS: dict[str, Changes] = {
    "renamed": (("LlamaModel", "OtherModel"), ("TransformerBlock", "OtherBlock")),
    "attention_written_out": (
        _own_attention("        scores = scores if mask is None else mx.where(mask, scores, -mx.inf)"),
    ),
    "attention_with_additive_mask": (
        _own_attention(
            "        scores = scores if mask is None else scores + mx.where(mask, 0.0, -1e9).astype(scores.dtype)"
        ),
    ),
    # The position on the host
    "rope_offset_by_int": (("offset=cache.offset)", "offset=int(cache.offset))"),),
    "rope_offset_by_item": (
        ("offset=cache.offset)", "offset=getattr(cache.offset, 'item', lambda: cache.offset)())"),
    ),
    "branch_on_offset": (
        (
            _FULL_MASK,
            _FULL_MASK
            + "        if cache[0] is not None and cache[0].offset > 7:\n            h = h * 1.5\n",
        ),
    ),
    "position_from_key_length": (
        (
            _ROTATE + _UPDATE,
            (
                "            keys, values = cache.update_and_fetch(keys, values)\n"
                "            at = keys.shape[2]\n"
                "            queries, keys = self.rope(queries, offset=at - L), self.rope(keys)\n"
            ),
        ),
    ),
    "keys_cut_by_offset": (
        (
            _UPDATE,
            _UPDATE
            + "            keys, values = keys[..., : cache.offset, :], values[..., : cache.offset, :]\n",
        ),
    ),
    "rotated_after_the_update": (
        (
            _ROTATE + _UPDATE,
            "            at = cache.offset\n            keys = self.rope(keys, offset=at)\n"
            + _UPDATE
            + "            queries = self.rope(queries, offset=at)\n",
        ),
    ),
    "offset_read_after_the_update": (
        (
            _ROTATE + _UPDATE,
            "            keys = self.rope(keys, offset=cache.offset)\n"
            + _UPDATE
            + "            queries = self.rope(queries, offset=cache.offset - L)\n",
        ),
    ),
    # State on the module
    "counter_on_module": (
        (_INIT, _INIT + "        self.seen = 0\n"),
        (_FULL_MASK, _FULL_MASK + "        h = h + 0.01 * self.seen\n        self.seen += h.shape[1]\n"),
    ),
    "toggle_each_call": (
        (_INIT, _INIT + "        self.odd = False\n"),
        (
            _FULL_MASK,
            _FULL_MASK + "        self.odd = not self.odd\n        h = h * 1.5 if self.odd else h\n",
        ),
    ),
    "mask_memoized": (
        (_INIT, _INIT + "        self.kept = {}\n"),
        (
            _FULL_MASK,
            (
                "        if h.shape[1] not in self.kept:\n"
                "            self.kept[h.shape[1]] = create_attention_mask(h, cache[self.fa_idx])\n"
                "        fa_mask = self.kept[h.shape[1]]\n"
            ),
        ),
    ),
    "window_start_captured_at_prefill": (
        (_INIT, _INIT + "        self.start = 0\n"),
        (
            _FULL_MASK,
            _FULL_MASK + "        if h.shape[1] > 1:\n            self.start = h.shape[1] - 1\n"
            "        h = h + 0.1 * self.start\n",
        ),
    ),
    "running_average": (
        (_INIT, _INIT + "        self.average = None\n"),
        (
            _NORM,
            (
                "        now = mx.mean(h, axis=1, keepdims=True)\n"
                "        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now\n"
                "        return self.norm(h + self.average)\n"
            ),
        ),
    ),
    "random_numbers": ((_NORM, "        return self.norm(h + 0.1 * mx.random.normal(h.shape))\n"),),
    # Masks
    "mask_added_as_bool": (_own_attention("        scores = scores if mask is None else scores + mask"),),
    "mask_multiplied": (_own_attention("        scores = scores if mask is None else scores * mask"),),
    "mask_left_out": ((_ATTEND, _ATTEND.replace("mask=mask", "mask=mask if L > 1 else None")),),
    "mask_left_out_in_one_layer": (
        (
            "            mask = swa_mask if layer.use_sliding else fa_mask\n",
            "            mask = None if layer is self.layers[1] and h.shape[1] == 1 else fa_mask\n",
        ),
    ),
    "mask_made_true": (
        (
            _FULL_MASK,
            _FULL_MASK + "        if isinstance(fa_mask, mx.array) and h.shape[1] == 1:\n"
            "            fa_mask = fa_mask | True\n",
        ),
    ),
    "mask_inverted_after": (
        _own_attention(
            "        if mask is not None:\n"
            "            scores = mx.where(mask, scores, -mx.inf) if L > 1 else mx.where(mask, -mx.inf, scores)"
        ),
    ),
    # Caches and weights
    "cache_of_another_layer": (
        (
            _LAYERS,
            "        for layer, cache in zip(self.layers, [cache[0], cache[1], cache[1], *cache[3:]]):\n",
        ),
    ),
    "attention_in_float32": (
        (
            _UPDATE,
            "            keys, values = keys.astype(mx.float32), values.astype(mx.float32)\n" + _UPDATE,
        ),
    ),
    "weight_in_closure": (
        (
            _MLP_INIT,
            _MLP_INIT + "        weight = self.up_proj.weight\n        self.up = lambda x: x @ weight.T\n",
        ),
        (_UP, _UP.replace("self.up_proj(x)", "self.up(x)")),
    ),
    "weight_transposed_in_closure": (
        (
            _MLP_INIT,
            _MLP_INIT + "        weight = self.up_proj.weight.T\n        self.up = lambda x: x @ weight\n",
        ),
        (_UP, _UP.replace("self.up_proj(x)", "self.up(x)")),
    ),
    "weight_kept_at_first_call": (
        (_MLP_INIT, _MLP_INIT + "        self._kept = []\n"),
        (
            _UP,
            (
                "        if not self._kept:\n            self._kept.append(self.up_proj.weight)\n"
                "        return self.down_proj(swiglu(self.gate_proj(x), x @ self._kept[0].T))\n"
            ),
        ),
    ),
    "norm_weight_copied_at_first_call": (
        (_INIT, _INIT + "        self._kept = []\n"),
        (
            _NORM,
            (
                "        if not self._kept:\n            self._kept.append(self.norm.weight * 2)\n"
                "        return mx.fast.rms_norm(h, self._kept[0], 1e-6)\n"
            ),
        ),
    ),
    "tied_weight_in_closure": (
        (
            "            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)\n",
            (
                "            self.lm_head = None\n        weight = self.model.embed_tokens.weight\n"
                "        self.head = lambda x: x @ weight.T\n"
            ),
        ),
        ("            out = self.lm_head(out)\n", "            out = self.head(out)\n"),
    ),
    "keys_cut_to_twenty": (
        (
            _UPDATE,
            _UPDATE + "            if L == 1:\n"
            "                keys, values, mask = keys[..., :20, :], values[..., :20, :], None\n",
        ),
    ),
}
