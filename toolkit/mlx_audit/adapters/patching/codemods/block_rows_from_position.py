"""Block-sparse attention whose rows are the blocks of the queries, not the last blocks of the key buffer."""

from __future__ import annotations

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.adapters.patching.statements import block, edits

_MASK = """
def _block_sparse_mask(self, q_len, kv_len):
    vert_stride = self.blocksparse_vert_stride
    local_blocks = self.blocksparse_num_local_blocks
    block_size = self.blocksparse_block_size
    n_heads = self.n_heads

    kv_blocks = (kv_len + block_size - 1) // block_size
    q_blocks = (q_len + block_size - 1) // block_size
    q_pos = mx.arange(kv_blocks - q_blocks, kv_blocks)[None, :, None]
    k_pos = mx.arange(kv_blocks)[None, None]

    mask_vert_strided = (
        mx.arange(kv_blocks)[None, :] + mx.arange(1, n_heads + 1)[:, None]
    ) % vert_stride
    mask_vert_strided = (mask_vert_strided == 0)[:, None, :]

    block_mask = (q_pos >= k_pos) & (
        (q_pos - k_pos < local_blocks) | mask_vert_strided
    )
    block_mask = block_mask.reshape(
        self.n_kv_heads, self.n_q_per_kv, *block_mask.shape[-2:]
    )
    dense_mask = mx.repeat(
        mx.repeat(block_mask, block_size, axis=-1), block_size, axis=-2
    )
    return block_mask, dense_mask[..., -q_len:, :kv_len]
"""

_MENDED_MASK = """
def _block_sparse_mask(self, q_len, kv_len, offset, slot):
    vert_stride = self.blocksparse_vert_stride
    local_blocks = self.blocksparse_num_local_blocks
    block_size = self.blocksparse_block_size
    n_heads = self.n_heads

    # Blocks are cut over a row's own tokens, which left padding moves on
    offset = mx.array(offset)[..., None]
    slot = mx.array(kv_len - q_len if slot is None else slot)[..., None]
    q_pos = (mx.arange(q_len) + offset) // block_size
    k_pos = (mx.arange(kv_len) + offset - slot) // block_size
    q_pos = q_pos[..., None, :, None]
    k_pos = k_pos[..., None, None, :]

    mask_vert_strided = (
        k_pos + mx.arange(1, n_heads + 1)[:, None, None]
    ) % vert_stride
    mask_vert_strided = mask_vert_strided == 0

    dense_mask = (q_pos >= k_pos) & (
        (q_pos - k_pos < local_blocks) | mask_vert_strided
    )
    return mx.unflatten(dense_mask, -3, (self.n_kv_heads, self.n_q_per_kv))
"""

_ASKED = "block_mask, dense_mask = self._block_sparse_mask(L, keys.shape[-2])\n"
_MENDED_ASKED = "dense_mask = self._block_sparse_mask(L, keys.shape[-2], offset, slot)\n"

_UPDATE = """
if cache is not None:
    queries = self.rope(queries, offset=cache.offset)
    keys = self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, values)
else:
    queries = self.rope(queries)
    keys = self.rope(keys)
"""
_PLACED_UPDATE = f"""
# Before the update, which moves both on
offset = cache.offset if cache is not None else 0
slot = cache.slot if hasattr(cache, "slot") else None
{_UPDATE}
"""

_CALL = """
output = self._block_sparse_attention(
    queries, keys, values, scale=self.scale, mask=mask
)
"""
_MENDED_CALL = """
output = self._block_sparse_attention(
    queries,
    keys,
    values,
    scale=self.scale,
    mask=mask,
    offset=offset,
    slot=slot,
)
"""

_PARAMETERS = ["self", "queries", "keys", "values", "scale", "mask"]


class BlockRowsFromPosition(Codemod):
    """Takes the blocks of the queries of block-sparse attention from the position, as phi3small writes it.

        kv_blocks = (kv_len + block_size - 1) // block_size                  before
        q_pos = mx.arange(kv_blocks - q_blocks, kv_blocks)

        q_pos = (mx.arange(q_len) + offset) // block_size                    after

    With a buffer of fixed capacity the last blocks are those of the capacity. A single token gets bit for bit what it
    got, and so does a prompt that fills its blocks. The rows of any other prompt were those of tokens further on (the
    last of them were right): now each has its own, which makes the logits of a prompt those of its tokens one by one.
    The blocks of a row are cut over its own tokens, so a row in a batch with left padding is what it is alone. That
    mlx-lm's prompts also see later tokens is another matter: see `mask_applied`.

    All places must say what phi3small says; otherwise nothing is changed.
    """

    name = "block_rows_from_position"
    mends = ("SRC002",)

    def apply(self, tree: cst.Module) -> cst.Module:
        changes: dict[cst.CSTNode, code.Change] = {}
        for node in tree.body:
            methods = _methods(node)
            mask, attention, call = map(
                methods.get, ("_block_sparse_mask", "_block_sparse_attention", "__call__")
            )
            if mask and attention and call:
                changes |= _mended(node, attention, call)
        return code.replaced(tree, changes)


def _methods(node: cst.CSTNode) -> dict[str, cst.FunctionDef]:
    body = block(node.body) if isinstance(node, cst.ClassDef) else ()
    return {method.name.value: method for method in body if isinstance(method, cst.FunctionDef)}


def _mended(
    node: cst.CSTNode, attention: cst.FunctionDef, call: cst.FunctionDef
) -> dict[cst.CSTNode, code.Change]:
    """Return the changes of a class, or none if one of its places says something else."""
    names = [
        name.value for each in (attention, call) for name in code.walk(each) if isinstance(name, cst.Name)
    ]
    parts = [
        edits(node, [(_MASK, _MENDED_MASK)]),
        edits(attention, [(_ASKED, _MENDED_ASKED)]),
        edits(call, [(_UPDATE, _PLACED_UPDATE), (_CALL, _MENDED_CALL)]),
    ]
    own = [parameter.name.value for parameter in attention.params.params]
    if not all(parts) or own != _PARAMETERS or names.count("block_mask") != 1 or "slot" in names:
        return {}
    added = [cst.Param(cst.Name(name)) for name in ("offset", "slot")]
    parameters = attention.params.with_changes(params=[*attention.params.params, *added])
    return {attention.params: parameters, **parts[0], **parts[1], **parts[2]}
