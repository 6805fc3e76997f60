"""Key blocks chosen by the position, not by the length of the key buffer."""

from __future__ import annotations

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.adapters.patching.statements import block, edits, only, written

_UPDATE = """
if cache is not None:
    k, _ = cache.update_and_fetch(k, mx.zeros((B, 1, L, 0), k.dtype))
"""
_SLOT = 'slot = cache.slot if hasattr(cache, "slot") else None'

_CHOICE = """
qpos = mx.arange(S - L, S)
causal = mx.arange(S)[None] <= qpos[:, None]
scores = q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(-1, -2)
per_key = mask if isinstance(mask, mx.array) else causal
scores = mx.where(per_key, scores, -mx.inf)
split = full_blocks * block_size
block_scores = scores[..., :split].reshape(B, H, L, full_blocks, block_size)
block_scores = block_scores.max(axis=-1)
if tail_keys:
    tail_score = scores[..., split:].max(axis=-1, keepdims=True)
    block_scores = mx.concatenate([block_scores, tail_score], axis=-1)
if self.index_local_blocks > 0:
    q_block = (qpos // block_size)[:, None]
    ids = mx.arange(n_blocks)
    is_local = (ids <= q_block) & (ids > q_block - self.index_local_blocks)
    block_scores = mx.where(is_local, mx.inf, block_scores)
inds = mx.argpartition(-block_scores, kth=topk - 1, axis=-1)[..., :topk]
inds = mx.stop_gradient(inds)
keep = mx.put_along_axis(
    mx.zeros(block_scores.shape, dtype=mx.bool_), inds, mx.array(True), axis=-1
)
keep = mx.repeat(keep, block_size, axis=-1)[..., :S] & per_key
return mx.repeat(keep, self.num_attention_heads // H, axis=1)
"""
_FIXED = """
if slot is not None:
    return self._fixed_block_mask(q, k, mask, offset, slot)
"""

_METHOD = '''
def _fixed_block_mask(
    self,
    q: mx.array,
    k: mx.array,
    mask: mx.array,
    offset: mx.array,
    slot: mx.array,
) -> mx.array:
    """The same for a fixed capacity, where the key length is no position."""
    B, H, L, _ = q.shape
    S = k.shape[2]
    topk = self.index_topk_blocks
    scores = q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.where(mask, scores, -mx.inf)

    # Blocks are cut over a row's own tokens, which left padding moves on.
    q_block = (mx.arange(L) + offset[:, None]) // self.index_block_size
    k_block = (mx.arange(S) + (offset - slot)[:, None]) // self.index_block_size
    k_block = mx.maximum(k_block, 0)[:, None, None]

    # A row a query, and as many blocks as keys, most of them empty: no shape
    # depends on where the last block ends.
    k_block = mx.broadcast_to(k_block, scores.shape).reshape(-1, S)
    block_scores = mx.full(k_block.shape, -mx.inf)
    rows = mx.arange(k_block.shape[0])[:, None]
    block_scores = block_scores.at[rows, k_block].maximum(scores.reshape(-1, S))
    if self.index_local_blocks > 0:
        q_block = q_block[:, None, :, None]
        ids = mx.arange(S)
        is_local = (ids <= q_block) & (ids > q_block - self.index_local_blocks)
        is_local = mx.broadcast_to(is_local, scores.shape).reshape(-1, S)
        block_scores = mx.where(is_local, mx.inf, block_scores)

    inds = mx.argpartition(-block_scores, kth=topk - 1, axis=-1)[..., :topk]
    inds = mx.stop_gradient(inds)
    keep = mx.zeros(block_scores.shape, dtype=mx.bool_)
    keep = mx.put_along_axis(keep, inds, mx.array(True), axis=-1)
    keep = mx.take_along_axis(keep, k_block, axis=-1)
    # A kept block still holds future keys, so mask again.
    keep = keep.reshape(scores.shape) & mask
    return mx.repeat(keep, self.num_attention_heads // H, axis=1)
'''

_FETCHED = """
k, v = kv_cache.update_and_fetch(k, v)
if self.is_sparse_attn:
    index_kv = [cache[1].keys, cache[1].values]
    kv_cache.keys = mx.depends(kv_cache.keys, index_kv)
"""
_DEPENDS = ("kv_cache.keys = mx.depends(kv_cache.keys, index_kv)", "k = mx.depends(k, index_kv)")


class KeyBlocksFromPosition(Codemod):
    """Chooses the key blocks of an indexer by the position where the cache has a fixed capacity, as minimax_m3_vl
    writes it; eager decoding is what it was, bit for bit.

        qpos = mx.arange(S - L, S)                                           before

        if slot is not None:                                                 after
            return self._fixed_block_mask(q, k, mask, offset, slot)
        qpos = mx.arange(S - L, S)

    With a buffer of fixed capacity the last block is that of the capacity: it takes the place of the local one. The
    method that is added scores each block by its best key, as before, but takes the local block from the position and
    cuts blocks over a row's own tokens: a row with left padding chooses what it would alone. Where two blocks tie, it
    may take the other one.

    What the model hangs on the keys of the cache hangs on the fetched ones now: attention reads these, and a compiled
    step returns the others. All places must say what minimax_m3_vl says; otherwise nothing is changed.
    """

    name = "key_blocks_from_position"
    mends = ("SRC002",)

    def apply(self, tree: cst.Module) -> cst.Module:
        for index, node in enumerate(tree.body):
            methods = block(node.body) if isinstance(node, cst.ClassDef) else []
            at = next((at for at, method in enumerate(methods) if _name(method) == "_block_mask"), None)
            changes = _changes(node, methods[at]) if at is not None else {}
            if at is not None and changes:
                return _with_method(code.replaced(tree, changes), index, at + 1)
        return tree


def _name(method: cst.CSTNode) -> str:
    return method.name.value if isinstance(method, cst.FunctionDef) else ""


def _changes(node: cst.CSTNode, choosing: cst.BaseStatement) -> dict[cst.CSTNode, code.Change]:
    """Return the changes of a class, or none if one of its places says something else, as after an earlier patch."""
    update, choice = only(choosing, _UPDATE), only(choosing, _CHOICE)
    depends = edits(node, [_DEPENDS]) if only(node, _FETCHED) else {}
    names = code.names(node)
    if not (update and choice and depends) or {"slot", "_fixed_block_mask"} & names:
        return {}
    return {
        update[0]: cst.FlattenSentinel([*written(_SLOT), update[0]]),
        choice[0]: cst.FlattenSentinel([*written(_FIXED), choice[0]]),
        **depends,
    }


def _with_method(tree: cst.Module, index: int, at: int) -> cst.Module:
    """Return the module with the method at a place in the class that is statement `index`."""
    node = cst.ensure_type(tree.body[index], cst.ClassDef)
    body = list(node.body.body)
    (method,) = written(_METHOD)
    method = cst.ensure_type(method, cst.FunctionDef).with_changes(
        leading_lines=[cst.EmptyLine(indent=False)]
    )
    node = node.with_changes(body=node.body.with_changes(body=[*body[:at], method, *body[at:]]))
    return tree.with_changes(body=[*tree.body[:index], node, *tree.body[index + 1 :]])
