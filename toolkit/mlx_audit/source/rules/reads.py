"""The position, or data of the step, read on the host."""

from __future__ import annotations

from mlx_audit.source.events import Called, Combined, Finding, Formatted, Sliced, Tested, rule
from mlx_audit.source.tags import Tag, Tags
from mlx_audit.source.values import Mapping, Sequence

_CONVERTING = (
    "int",
    "float",
    "bool",
    "round",
    "complex",
    "hex",
    "bin",
    "chr",
    "divmod",
    "sorted",
    "any",
    "all",
    "slice",
)
_READING = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__")
_TEXT = ("str", "repr", "format", "print", "ascii")
_SHAPING = frozenset(
    {"zeros", "ones", "full", "eye", "tri", "linspace", "reshape", "broadcast_to", "tile", "repeat", "split",
     "unflatten", "roll", "pad", "view"}
)  # fmt: skip


def read(tags: Tags, kind: str, text: str) -> Finding | None:
    """Return the finding for a host read of a value with these tags, None where nothing of the step is read."""
    if tags & Tag.HELD:
        return Finding("SRC006", kind, f"`{text}` uses a number that the model's own cache keeps on the host")
    if tags & (Tag.POSITION | Tag.MASK):
        return Finding("SRC001", kind, f"`{text}` reads the position on the host")
    if tags & Tag.DATA:
        return Finding("SRC005", kind, f"`{text}` reads data of the step on the host")
    return None


@rule(Called)
def conversion(event: Called) -> Finding | None:
    """`int(offset)`, `float(x)`, `round(offset)`."""
    name = event.target.removeprefix("builtins.")
    if event.target.startswith("builtins.") and name in _CONVERTING:
        tags = event.tags & ~Tag.HELD
        return read(tags, "slice bound" if name == "slice" else f"{name}()", event.text)
    return None


@rule(Called)
def array_read(event: Called) -> Finding | None:
    """`offset.item()`, `inds.tolist()`."""
    if event.target[:1] == "." and event.target[1:] in _READING:
        return read(event.receiver.tags, f"{event.target}()", event.text)
    return None


@rule(Called)
def evaluation(event: Called) -> Finding | None:
    """`mx.eval(x)` inside the step."""
    if event.target in ("mlx.core.eval", "mlx.core.async_eval"):
        return read(event.tags, "eval()", event.text)
    return None


@rule(Called)
def extremum(event: Called) -> Finding | None:
    """Python's `max(offset, 1)` asks which is larger."""
    if event.target in ("builtins.max", "builtins.min"):
        return read(event.tags & ~Tag.HELD, "max()/min()", event.text)
    return None


@rule(Called)
def host_range(event: Called) -> Finding | None:
    """`range(offset, end)`, `enumerate(xs, offset)`."""
    if event.target == "builtins.range":
        return read(event.tags, "range bound", event.text)
    start = event.argument(1, "start") if event.target == "builtins.enumerate" else None
    return read(start.tags, "range bound", event.text) if start else None


@rule(Called)
def array_range(event: Called) -> Finding | None:
    """`mx.arange(offset, end)`: MLX takes no arrays as bounds."""
    if event.target == "mlx.core.arange":
        return read(event.tags, "arange bound", event.text)
    return None


@rule(Called)
def numpy(event: Called) -> Finding | None:
    """`np.arange(offset)`, `math.log(offset)`: a conversion to a host number."""
    if event.target.startswith(("itertools.", "operator.index", "bisect.")):
        return read(event.tags & Tag.POSITION, "host library", event.text)
    if event.target.startswith(("numpy.", "math.", "array.", "torch.")):
        return read(
            event.tags & ~Tag.HELD,
            "numpy" if event.target.startswith("numpy") else "host library",
            event.text,
        )
    return None


@rule(Called)
def shape(event: Called) -> Finding | None:
    """`mx.zeros((offset, n))`, `x.reshape(offset, -1)`: a shape that depends on the position."""
    method = event.target[:1] == "."
    name = event.target.rpartition(".")[2]
    if name not in _SHAPING or not (method or event.target.startswith("mlx.core.")):
        return None
    first = 0 if method or name in ("zeros", "ones", "full", "eye", "tri", "linspace") else 1
    sizes = [*event.positional[first : first + 1 if name == "full" else None], *event.keywords.values()]
    tags = Tag.NONE
    for size in sizes:
        tags |= size.all_tags()
    return read(tags & (Tag.POSITION | Tag.HELD), "shape", event.text)


@rule(Called)
def text(event: Called) -> Finding | None:
    """`print(offset)`, `"{}".format(offset)`, `logger.info(offset)`."""
    name = event.target.rpartition(".")[2]
    if event.target.removeprefix("builtins.") in _TEXT or event.target.startswith(
        ("logging.", "warnings.", "sys.std")
    ):
        return read(event.tags & ~Tag.HELD, "text", event.text)
    if name == "format" and isinstance(event.receiver.constant(), str):
        return read(event.tags & ~Tag.HELD, "text", event.text)
    return None


@rule(Formatted)
def formatted(event: Formatted) -> Finding | None:
    """`f"{offset}"`."""
    return read(event.value.all_tags() & ~Tag.HELD, "text", event.text)


@rule(Tested)
def branch(event: Tested) -> Finding | None:
    """`if offset > 0`, `while`, `assert`, `and`, `not`, a chained comparison."""
    if event.value.open:
        return read(event.value.tags, "branch", event.text)
    return None


@rule(Sliced)
def slice_bound(event: Sliced) -> Finding | None:
    """`x[:, :offset]`: MLX takes no arrays as bounds."""
    tags = Tag.NONE
    for bound in (*event.lower, *event.upper):
        tags |= bound.tags
    return read(tags, "slice bound", event.text)


@rule(Sliced)
def host_index(event: Sliced) -> Finding | None:
    """`table[offset]`, where the table is a list or a dictionary."""
    if not event.base.open and any(isinstance(thing, Sequence | Mapping) for thing in event.base.things):
        tags = Tag.NONE
        for index in event.indices:
            tags |= index.tags
        return read(tags & ~Tag.HELD, "host index", event.text)
    return None


@rule(Combined)
def repetition(event: Combined) -> Finding | None:
    """`[0] * offset`."""
    lists = [
        v for v in (event.left, event.right) if not v.open and any(isinstance(t, Sequence) for t in v.things)
    ]
    if event.operator == "multiply" and lists:
        return read((event.left.tags | event.right.tags) & Tag.POSITION, "host index", event.text)
    return None
