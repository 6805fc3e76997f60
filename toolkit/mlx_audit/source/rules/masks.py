"""Masks: made by the cache, and applied."""

from __future__ import annotations

from mlx_audit.source.events import Called, Combined, Finding, rule
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import NOTHING


@rule(Combined)
def added(event: Combined) -> Finding | None:
    """`scores + mask`: a boolean mask hides nothing, it adds 0 or 1."""
    if event.operator not in ("add", "subtract"):
        return None
    left, right = event.left.has(Tag.MASK), event.right.has(Tag.MASK)
    other = event.right if left else event.left
    if left == right or not other.has(Tag.DATA | Tag.KEYS):
        return None
    return Finding("SRC003", "mask added", f"`{event.text}` adds a boolean mask in place of applying it")


@rule(Called)
def made(event: Called) -> Finding | None:
    """`create_attention_mask(h, cache)`, `cache.make_mask(N)`."""
    name = event.target.rpartition(".")[2]
    if name in ("create_attention_mask", "create_ssm_mask", "make_mask"):
        return Finding("", "mask", f"`{event.text}` asks the cache for its mask")
    return None


@rule(Called)
def added_by_function(event: Called) -> Finding | None:
    """`mx.add(scores, mask)`."""
    if event.target not in ("mlx.core.add", "mlx.core.subtract") or len(event.positional) < 2:
        return None
    return added(Combined(event.node, event.frame, "add", event.positional[0], event.positional[1]))


@rule(Called)
def missing(event: Called) -> Finding | None:
    """Attention over a cache's keys without a mask: eager code may leave it out for one token, a buffer may not."""
    name = event.target.rpartition(".")[2]
    what = f"`{event.text}` attends over the keys of a cache without a mask"
    if name == "scaled_dot_product_attention" and event.target.startswith("mlx.core.fast."):
        keys, mask = event.argument(1, "k"), event.argument(4, "mask")
        if keys and keys.has(Tag.KEYS) and (mask is None or mask == NOTHING):
            return Finding("SRC003", "no mask", what, goes_on=True)
    operand = event.receiver if event.target[:1] == "." else event.argument(0, "a")
    if name == "softmax" and operand and operand.has(Tag.UNMASKED):
        return Finding("SRC003", "no mask", what, goes_on=True)
    return None
