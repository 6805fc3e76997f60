"""deepseek_v41: what counts on the host goes into the family's own cache class, which has a fixed-capacity form."""

from __future__ import annotations

import libcst as cst

from mlx_audit.adapters.patching.codemods.new_fixed_capacity_cache import NewFixedCapacityCache


class DeepseekV41Caches(NewFixedCapacityCache):
    """Lets deepseek_v41's layers ask their cache what depends on the position, instead of computing it from shapes.

        pending = 0 if cache.pending_kv is None else cache.pending_kv.shape[1]    before, in Compressor
        kv, gate, first = cache.update_pending(...)                               after

    The lines move into methods of `LayerCache` as they are, so eager decoding stays bit-equal; the fixed-capacity form
    has methods of the same names. The pieces must be found word for word, all of them: otherwise nothing is changed.
    """

    name = "deepseek_v41_caches"
    mends = ("SRC006",)
    module = "deepseek_v41"
    home = "mlx_audit.adapters.special.deepseek_v41"
    adapter = "DeepseekV41Adapter"

    def apply(self, tree: cst.Module) -> cst.Module:
        code, line_end = tree.code, tree.default_newline
        for before, after in _EDITS:
            found, mended = (text.replace("\n", line_end) for text in (before, after))
            if code.count(found) != 1:
                return tree
            code = code.replace(found, mended)
        return super().apply(cst.parse_module(code))


_INIT = (
    """\
    def __init__(self, window_size: int):
        self.window_size = window_size
        self.offset = 0
""",
    """\
    def __init__(self, window_size: int, ratio: int = 0):
        self.window_size = window_size
        self.ratio = ratio
        self.offset = 0
""",
)

_METHODS = (
    """\
        self.offset += kv.shape[1]
        return window

""",
    '''\
        self.offset += kv.shape[1]
        return window

    def window_indices(self, length: int) -> mx.array:
        """The window rows each of the next queries attends to, -1 for none."""
        previous = 0 if self.window is None else self.window.shape[1]
        return _window_indices(
            previous=previous, length=length, window=self.window_size
        )

    def update_pending(
        self, kv: mx.array, gate: mx.array, ratio: int, start_pos: int
    ) -> tuple[Optional[mx.array], Optional[mx.array], int]:
        """Append the rows to those of the open group. Return the rows of each full
        group, or None if no group is full, and the index of the first one."""
        pending = 0 if self.pending_kv is None else self.pending_kv.shape[1]
        kv = _append(self.pending_kv, kv)
        gate = _append(self.pending_gate, gate)
        full = kv.shape[1] - kv.shape[1] % ratio
        self.pending_kv = kv[:, full:]
        self.pending_gate = gate[:, full:]
        # A group takes the position of its first token, and the RoPE scale
        # multiplies the offset by the ratio, so return the group index.
        first = (start_pos - pending) // ratio
        if full == 0:
            return None, None, first
        batch, _, dim = kv.shape
        kv = kv[:, :full].reshape(batch, -1, ratio, dim)
        gate = gate[:, :full].reshape(batch, -1, ratio, dim)
        return kv, gate, first

    def update_compressed(self, kv: mx.array, k: Optional[mx.array]) -> None:
        """Append the compressed KV, and the index keys if the layer makes them."""
        self.compress_kv = _append(self.compress_kv, kv)
        if k is not None:
            self.index_k = _append(self.index_k, k)

    @property
    def caches(self) -> tuple[Any, ...]:
        """What the cache holds, as mlx-lm's own caches."""
        from mlx_audit.adapters.special.deepseek_v41 import parts_of

        return parts_of(self)

''',
)

_PENDING = (
    """\
        pending = 0 if cache.pending_kv is None else cache.pending_kv.shape[1]
        kv = _append(cache.pending_kv, self.kv_proj(h))
        gate = _append(cache.pending_gate, self.gate_proj(h))
        full = kv.shape[1] - kv.shape[1] % self.ratio
        cache.pending_kv = kv[:, full:]
        cache.pending_gate = gate[:, full:]
        # A group takes the position of its first token, and the RoPE scale
        # multiplies the offset by the ratio, so return the group index.
        first = (start_pos - pending) // self.ratio
        if full == 0:
            return None, first
        batch, _, dim = kv.shape
        kv = kv[:, :full].reshape(batch, -1, self.ratio, dim)
        gate = gate[:, :full].reshape(batch, -1, self.ratio, dim)
""",
    """\
        kv, gate, first = cache.update_pending(
            self.kv_proj(h), self.gate_proj(h), self.ratio, start_pos
        )
        if kv is None:
            return None, first
""",
)

_ROWS = (
    """\
    base = (mx.arange(batch, dtype=mx.int32) * length).reshape(batch, 1, 1)
""",
    """\
    base = mx.arange(0, batch * length, length, dtype=mx.int32).reshape(batch, 1, 1)
""",
)

_COMPRESSED = (
    """\
            cache.compress_kv = _append(cache.compress_kv, kv)
            if self.is_index_source:
""",
    """\
            k = None
            if self.is_index_source:
""",
)

_INDEX_KEYS = (
    """\
                cache.index_k = _append(cache.index_k, k)
        shared["compress_kv"] = cache.compress_kv
""",
    """\
            cache.update_compressed(kv, k)
        shared["compress_kv"] = cache.compress_kv
""",
)

_MAKE_CACHE = (
    """\
        return [LayerCache(self.args.sliding_window) for _ in self.pipeline_layers]
""",
    """\
        return [
            LayerCache(
                self.args.sliding_window,
                layer.self_attn.ratio if layer.self_attn.is_kv_source else 0,
            )
            for layer in self.pipeline_layers
        ]
""",
)

_WINDOW = (
    """\
        previous = 0 if cache[0].window is None else cache[0].window.shape[1]
        window_idx = _window_indices(
            previous=previous, length=length, window=self.args.sliding_window
        )
""",
    """\
        window_idx = cache[0].window_indices(length)
""",
)

_EDITS = (_INIT, _METHODS, _PENDING, _ROWS, _COMPRESSED, _INDEX_KEYS, _MAKE_CACHE, _WINDOW)
