"""The mask of attention within chunks, asked from the cache instead of built from its position."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.adapters.patching.statements import block, exchanged, fitted, indentation, said, written

_KEYS, _QUERIES = "mx.arange({start}, {end})", "mx.arange({offset}, {end})[:, None]"
_MASKS = [
    f"({_KEYS} // {{size}} == {_QUERIES} // {{size}}) & ({_KEYS} <= {_QUERIES})",
    f"(mx.abs({_KEYS} // {{size}} - {_QUERIES} // {{size}}) == 0) & ({_KEYS} <= {_QUERIES})",
]
"""The mask in one expression."""

_ASKED = """\
if {there} and hasattr({cache}, "make_mask"):
    # The keys that it returns are its own matter
    {mask} = {cache}.make_mask({length})
else:
    pass
"""


class ChunkMaskFromCache(Codemod):
    """Asks the cache for the mask within chunks, as `create_attention_mask` of mlx-lm does; one that has none to give
    (mlx-lm's ChunkedKVCache) gets the mask that it got.

        linds = mx.arange(cache[0].start_position, end)                      before
        rinds = mx.arange(cache[0].offset, end)[:, None]
        chunk_mask = (linds // size == rinds // size) & (linds <= rinds)

        if cache is not None and hasattr(cache[0], "make_mask"):             after
            chunk_mask = cache[0].make_mask(h.shape[1])
        else:
            ...

    A range between two positions has a length that the host must know, and a ring holds its keys in another order.
    Eager decoding is what it was.
    """

    name = "chunk_mask_from_cache"
    mends = ("SRC001",)

    def apply(self, tree: cst.Module) -> cst.Module:
        changes: dict[cst.CSTNode, code.Change] = {}
        parents = code.parents(tree)
        if _has_own_cache(tree):
            return tree
        for function in code.functions(tree):
            for body in map(block, code.walk(function)):
                for at, bounds in enumerate(body):
                    changes |= _Run(function, parents, bounds, body[at + 1 :]).changes()
        return code.replaced(tree, changes)


class _Run:
    """Assignments that follow the `if` which reads the bounds of a mask from the cache."""

    def __init__(
        self,
        function: cst.FunctionDef,
        parents: code.Parents,
        bounds: cst.BaseStatement,
        rest: Sequence[cst.BaseStatement],
    ) -> None:
        self.function = function
        self.parents = parents
        self.bounds = bounds
        self.lines: list[cst.BaseStatement] = []
        self.values: dict[str, cst.BaseExpression] = {}
        for line in rest:
            name, value = _assigned(line)
            if value is None or name in self.values:
                break
            self.lines.append(line)
            self.values[name] = value

    def changes(self) -> dict[cst.CSTNode, code.Change]:
        found = _bounds(self.bounds) if self.lines else None
        if found is None:
            return {}
        there, cache, start, offset = found
        stored = {name for line in (self.bounds, *self.lines) for name, _ in code.stores(line)}
        if stored & {*re.findall(r"\w+", f"{there} {cache}")}:
            return {}
        while self.lines:
            mask = list(self.values)[-1]
            length = self._length(mask, start, offset)
            if length and self._used_only_here([start, offset, *self.values], mask):
                source = _ASKED.format(there=there, cache=cache, mask=mask, length=length)
                return self._moved(source)
            self.lines.pop()
            self.values.pop(mask)
        return {}

    def _length(self, mask: str, start: str, offset: str) -> str:
        """Return how many queries the mask is for; nothing if it is another mask."""
        plain = code.text(self._inlined(self.values[mask]))
        end = re.search(rf"mx\.arange\({start}, ({offset} \+ ([\w.\[\]]+))\)", plain)
        size = re.search(r" // ([\w.]+)", plain)
        if end is None or size is None:
            return ""
        names = {"start": start, "offset": offset, "end": end[1], "size": size[1]}
        return end[2] if plain in [form.format(**names) for form in _MASKS] else ""

    def _inlined(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Return an expression with the earlier names of the run exchanged for what they stand for."""
        names = [n for n in code.walk(value) if isinstance(n, cst.Name) and n.value in self.values]
        return exchanged(value, {name: _bracketed(self._inlined(self.values[name.value])) for name in names})

    def _used_only_here(self, names: Sequence[str], mask: str) -> bool:
        """Return whether only the mask is used after the run, and nothing of it is set elsewhere."""
        here = [*self.lines, self.bounds]
        return all(
            _count(name, self.function) == sum(_count(name, line) for line in here)
            for name in names
            if name != mask
        )

    def _moved(self, source: str) -> dict[cst.CSTNode, code.Change]:
        first, *others = self.lines
        (choice,) = written(source, first)
        assert isinstance(choice, cst.If)
        assert isinstance(choice.orelse, cst.Else)
        column = indentation(first, self.parents) + 4
        lines = [fitted(line, column) for line in (first.with_changes(leading_lines=[]), *others)]
        orelse = choice.orelse.with_changes(body=cst.IndentedBlock(lines))
        removed: dict[cst.CSTNode, code.Change] = {line: cst.RemoveFromParent() for line in others}
        return {first: choice.with_changes(orelse=orelse), **removed}


def _bounds(statement: cst.BaseStatement) -> tuple[str, str, str, str] | None:
    """Return the condition, the cache and the names of start and offset that an `if` reads from it, else sets to 0."""
    match statement:
        case cst.If(
            test=test, body=cst.IndentedBlock(body), orelse=cst.Else(body=cst.IndentedBlock([_, _] as other))
        ):
            found = re.fullmatch(
                r"(?s:.*\n)?(\w+) = ([\w.\[\]]+)\.start_position\n(\w+) = \2\.offset", said(*body)
            )
            if found and said(*other) == f"{found[1]} = 0\n{found[3]} = 0":
                return code.text(test), found[2], found[1], found[3]
    return None


def _has_own_cache(tree: cst.Module) -> bool:
    """Whether a class of the file has a start position, and so perhaps masks of another kind to give."""
    return any(
        isinstance(owner, cst.ClassDef) and any(_sets_start(node) for node in code.walk(owner))
        for owner in tree.body
    )


def _sets_start(node: cst.CSTNode) -> bool:
    target = node.target if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.AugAssign) else node
    if isinstance(target, cst.FunctionDef):
        return target.name.value == "start_position"
    return target is not node and code.text(target).rpartition(".")[2] == "start_position"


def _bracketed(value: cst.BaseExpression) -> cst.BaseExpression:
    return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _assigned(line: cst.BaseStatement) -> tuple[str, cst.BaseExpression | None]:
    match line:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value)]):
            return name, value
    return "", None


def _count(name: str, node: cst.CSTNode) -> int:
    return sum(isinstance(each, cst.Name) and each.value == name for each in code.walk(node))
