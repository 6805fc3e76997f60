"""What array operations return: where the result comes from, and its shape as far as it can be followed."""

from __future__ import annotations

from collections.abc import Sequence as Many

from mlx_audit.source.tags import POSITIONS, Tag, Tags
from mlx_audit.source.values import OPAQUE, SIZE, Constant, Sequence, Value, constant, join, sequence, tagged

Shape = tuple[Value, ...] | None

CREATING = frozenset({"zeros", "ones", "full", "eye", "tri", "identity", "linspace", "arange", "random"})
COMPARING = frozenset({"greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "isclose"})
BITWISE = frozenset(
    {"logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_invert"}
)
MOVING = frozenset(
    {"reshape", "transpose", "swapaxes", "moveaxis", "expand_dims", "squeeze", "broadcast_to", "flatten", "unflatten",
     "repeat", "tile", "concatenate", "stack", "split", "contiguous", "array", "astype", "view", "pad", "roll"}
)  # fmt: skip
ARITHMETIC = frozenset(
    {"add", "subtract", "multiply", "divide", "floor_divide", "remainder", "maximum", "minimum", "power", "where",
     "logaddexp", "clip", "array", "square", "negative", "abs", "minus"}
)  # fmt: skip
REDUCING = frozenset(
    {
        "sum",
        "mean",
        "max",
        "min",
        "prod",
        "var",
        "std",
        "any",
        "all",
        "argmax",
        "argmin",
        "logsumexp",
        "item",
        "norm",
    }
)
SELECTING = frozenset(
    {"take", "take_along_axis", "gather_mm", "gather_qmm", "topk", "scaled_dot_product_attention"}
)
PRODUCTS = frozenset({"matmul", "quantized_matmul", "addmm", "einsum", "inner", "outer", "tensordot"})
HIDING = frozenset({"where", "add", "subtract", "minimum"})
BOOLEAN = COMPARING | BITWISE

_ARRAYS = (
    Tag.POSITION
    | Tag.RANGE
    | Tag.DATA
    | Tag.KEYS
    | Tag.MASK
    | Tag.OWN
    | Tag.GROWN
    | Tag.UNKNOWN
    | Tag.UNMASKED
    | Tag.MASKED
)


def result(name: str, arrays: Many[Value], keywords: dict[str, Value]) -> Value:
    """Return what the operation `name` returns; `arrays` are its arguments in order, the array first."""
    if name in CREATING:
        return _created(name, arrays, keywords)
    operands = [_flat(value) for value in (*arrays, *keywords.values())]
    tags = _carried(name, operands)
    shape = _shape(name, arrays, keywords)
    if name == "split":
        return sequence([tagged(tags, shape)], exact=False)
    return tagged(tags, shape)


def _flat(value: Value) -> Value:
    """Return a value, with what a list of arrays holds."""
    return tagged(value.all_tags(), value.shape) if value.things and not value.open else value


def _carried(name: str, operands: Many[Value]) -> Tags:
    """Return what an operation's result comes from."""
    arithmetic = name in ARITHMETIC or name in BOOLEAN
    tags = Tag.NONE
    for operand in operands:
        host = not arithmetic and not operand.has(Tag.RANGE)
        tags |= operand.tags & (_ARRAYS if host else _ARRAYS | Tag.LENGTH | Tag.BEFORE)
    if name in BOOLEAN and tags & (POSITIONS | Tag.MASK):
        return tags & ~(POSITIONS | Tag.DATA | Tag.KEYS) | Tag.MASK
    if name not in MOVING and name not in BOOLEAN and tags & Tag.MASK:
        tags = tags & ~Tag.MASK | Tag.POSITION  # numbers that the position decides
    tags = _hidden(name, operands, tags)
    if name in ("concatenate", "stack") and tags & Tag.OWN:
        tags |= Tag.GROWN
    if name in REDUCING or name in SELECTING or name in PRODUCTS:
        tags &= ~(Tag.KEYS | Tag.OWN | Tag.GROWN)
    return absorbed(tags, name in MOVING)


def _hidden(name: str, operands: Many[Value], tags: Tags) -> Tags:
    """Return the tags after it was seen whether an operation makes scores, or hides some of them."""
    if name in PRODUCTS or name in SELECTING:
        tags &= ~(Tag.MASKED | Tag.UNMASKED)
    elif name in HIDING and tags & (Tag.MASK | Tag.POSITION):
        tags |= Tag.MASKED
    if name == "matmul" and operands[-1].has(Tag.KEYS) and not operands[0].has(Tag.KEYS):
        shape = operands[-1].shape
        tags |= Tag.UNMASKED if shape and shape[-1].has(Tag.LENGTH) else Tag.NONE
    return tags & ~Tag.UNMASKED if tags & Tag.MASKED else tags


def absorbed(tags: Tags, moving: bool = False) -> Tags:
    """Return the tags of an array in which all these went: data of the step absorbs positions and masks."""
    if tags & (Tag.DATA | Tag.KEYS) and not moving:
        tags &= ~(POSITIONS | Tag.MASK)
    return tags


def _created(name: str, arrays: Many[Value], keywords: dict[str, Value]) -> Value:
    if name == "arange":
        return tagged(Tag.RANGE, (arrays[0],) if len(arrays) == 1 else None)
    held = keywords.get("vals") or (arrays[1] if name == "full" and len(arrays) > 1 else OPAQUE)
    shape = keywords.get("shape") or (arrays[0] if arrays else OPAQUE)
    return tagged(held.tags & _ARRAYS, _sizes([shape]) if name in ("zeros", "ones", "full") else None)


def _shape(name: str, arrays: Many[Value], keywords: dict[str, Value]) -> Shape:
    first = arrays[0].shape if arrays else None
    axis = keywords.get("axis")
    if name in ("reshape", "broadcast_to"):
        return _sizes(arrays[1:] or [keywords.get("shape", OPAQUE)])
    if name in PRODUCTS:
        second = arrays[1].shape if len(arrays) > 1 else None
        return _product(first, second) if name == "matmul" else None
    if name in ("where", *BOOLEAN) or name in ARITHMETIC:
        return broadcast(arrays)
    if name == "scaled_dot_product_attention":
        return first
    if name in (
        "concatenate",
        "stack",
        "expand_dims",
        "squeeze",
        "transpose",
        "swapaxes",
        "moveaxis",
        "split",
    ):
        places = [axis] if axis is not None else list(arrays[1:])
        return _moved(name, first if name != "concatenate" else _first_shape(arrays), places)
    if name in REDUCING:
        return first if keywords.get("keepdims") and first is None else None
    if name in MOVING - {"array", "astype", "view", "contiguous"} or name in SELECTING:
        return None
    return first


def _first_shape(arrays: Many[Value]) -> Shape:
    for thing in arrays[0].things if arrays else ():
        if isinstance(thing, Sequence) and thing.items:
            return thing.items[0].shape
    return None


def _moved(name: str, shape: Shape, places: list[Value]) -> Shape:
    """Return a shape after axes were moved, added or taken away."""
    axes = _axes(places)
    if name == "transpose" and shape and not places:
        return tuple(reversed(shape))
    if shape is None or axes is None:
        return None
    rank = len(shape)
    if name == "expand_dims":
        for axis in sorted(a % (rank + len(axes)) for a in axes):
            shape = (*shape[:axis], constant(1), *shape[axis:])
        return shape
    if any(not -rank <= axis < rank for axis in axes):
        return None
    axes = [axis % rank for axis in axes]
    if name == "transpose":
        return tuple(shape[axis] for axis in axes) if sorted(axes) == list(range(rank)) else None
    if name == "swapaxes" and len(axes) == 2:
        sizes = list(shape)
        sizes[axes[0]], sizes[axes[1]] = sizes[axes[1]], sizes[axes[0]]
        return tuple(sizes)
    if name == "squeeze":
        return tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if name in ("concatenate", "split"):
        changed = axes[-1]
        return tuple(
            tagged(size.tags | Tag.SHAPE) if axis == changed else size for axis, size in enumerate(shape)
        )
    return None


def _axes(places: list[Value]) -> list[int] | None:
    axes: list[int] = []
    for place in places:
        thing = place.only()
        items = thing.items if isinstance(thing, Sequence) and thing.exact else (place,)
        for item in items:
            number = item.constant()
            if not isinstance(number, int):
                return None
            axes.append(number)
    return axes or None


def _sizes(given: Many[Value]) -> Shape:
    """Return the shape that is given, as one tuple or as separate sizes."""
    if len(given) == 1:
        thing = given[0].only()
        if isinstance(thing, Sequence):
            given = thing.items if thing.exact else []
        elif not isinstance(thing, Constant):
            return None
    if not given or any(isinstance(size.only(), Sequence) for size in given):
        return None
    return tuple(SIZE if size.constant() == -1 else size for size in given)


def _product(left: Shape, right: Shape) -> Shape:
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    return (*left[:-1], right[-1])


def broadcast(operands: Many[Value]) -> Shape:
    """Return the shape to which arrays broadcast; one that comes from weights alone keeps the step's own axes."""
    known = [operand.shape for operand in operands if operand.shape is not None]
    unknown = [operand for operand in operands if operand.shape is None and operand.open]
    if not known or any(operand.tags & _ARRAYS for operand in unknown):
        return None
    rank = max(len(shape) for shape in known)
    padded = [(constant(1),) * (rank - len(shape)) + shape for shape in known]
    shape = tuple(_wider(column) for column in zip(*padded, strict=True))
    return tuple(SIZE if size == constant(1) else size for size in shape) if unknown else shape


def _wider(sizes: tuple[Value, ...]) -> Value:
    wide = [size for size in sizes if size.constant() != 1]
    return join(*wide) if wide else max(sizes, key=lambda size: size.tags)
