"""Positions as array arithmetic instead of a range between bounds that the host must know."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod

_ARANGE = re.compile(r"(np|numpy|mx)\.arange")
_INTEGERS = re.compile(r"(dtype=)?(np|numpy|mx)\.(?P<type>u?int(32|64))")
_SCALAR = re.compile(r"[\d.e]+|self(\.\w+)+")
_ELEMENTWISE = ("mx.array", "mx.log", "mx.log1p", "mx.floor", "mx.sqrt", "mx.exp", "mx.sin", "mx.cos")
_LENGTH = re.compile(r"\w+\.shape\[-?\d\]")
_POSITION = re.compile(r"\.offset\b")


class ArangeFromPosition(Codemod):
    """Builds position ids from the length and the offset, as mlx-lm's gpt2 does.

        mx.array(np.arange(cache[0].offset, cache[0].offset + L))    before
        mx.arange(L) + mx.array(cache[0].offset)[..., None]          after

    The same integers for an offset that is an int; `[1, L]` and `[B, L]` of them for one that is an array. So only ids
    are mended whose rank is of no account: those that look up embeddings, or scale hidden states as `[..., None]`.
    Numpy's are of 64 bits. Where anything is computed with them they stay so, by `.astype`, lest it wrap around.
    """

    name = "arange_from_position"
    mends = ("SRC001",)

    def apply(self, tree: cst.Module) -> cst.Module:
        if "arange(" not in tree.code:
            return tree
        changes: dict[cst.CSTNode, cst.CSTNode] = {}
        parents, embeddings = code.parents(tree), _embeddings(tree)
        for function in code.functions(tree):
            changes.update(_Positions(function, parents, embeddings).changes())
        return _without_unused_numpy(code.replaced(tree, changes)) if changes else tree


class _Positions:
    """The position ids of one function."""

    def __init__(self, function: cst.FunctionDef, parents: code.Parents, embeddings: set[str]) -> None:
        self.function = function
        self.parents = parents
        self.stores = code.stores(function)
        self.embeddings = embeddings

    def changes(self) -> dict[cst.CSTNode, cst.CSTNode]:
        changes: dict[cst.CSTNode, cst.CSTNode] = {}
        for node in code.walk(self.function):
            if isinstance(node, cst.Call) and _ARANGE.fullmatch(code.text(node.func)):
                start, length = self._bounds(node.args)
                whole, row = self._whole(node)
                only_read = self._is_only_looked_up(whole)
                if length and self._any_rank_will_do(whole) and (only_read or not _is_numpy(whole)):
                    position = f"mx.array({start})" + (".reshape(-1, 1)" if row else "[..., None]")
                    source, type_ = f"mx.arange({length}) + {position}", self._type(node)
                    if type_ == "int32" or only_read:
                        sum_ = cst.parse_expression(source)
                        changes[whole] = sum_ if self._stands_alone(whole) else _in_parentheses(sum_)
                    else:
                        changes[whole] = cst.parse_expression(f"({source}).astype(mx.{type_})")
        return changes

    def _bounds(self, args: Sequence[cst.Arg]) -> tuple[str, str]:
        """Return start and length of a range that begins at the position; no length if it is no such range."""
        if (
            len(args) < 2
            or not all(_integer_type(arg) and arg.keyword for arg in args[2:])
            or any(a.keyword for a in args[:2])
        ):
            return "", ""
        start, end = args[0].value, args[1].value
        terms = self._terms(end)
        for term in self._terms(start):
            if term not in terms:
                return "", ""
            terms.remove(term)
        if not self._is_position(code.text(start)) or any(self._is_position(term) for term in terms):
            return "", ""
        return code.text(start), " + ".join(terms)

    def _terms(self, value: cst.BaseExpression, depth: int = 4) -> list[str]:
        """Return what a value is the sum of; a name that is set once stands for what it is set to."""
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
            return self._terms(value.left, depth) + self._terms(value.right, depth)
        known = self._set_once(value.value) if isinstance(value, cst.Name) and depth else None
        if isinstance(known, cst.BinaryOperation | cst.Name | cst.Attribute):
            return self._terms(known, depth - 1)
        return [code.text(value)]

    def _set_once(self, name: str) -> cst.BaseExpression | None:
        """Return the only value of a name, if what that is made of does not change afterwards."""
        places = [place for place, (stored, _) in enumerate(self.stores) if stored == name]
        value = self.stores[places[0]][1] if len(places) == 1 else None
        later = {stored for stored, _ in self.stores[places[0] + 1 :]} if value else set()
        return value if value and not code.names(value) & later else None

    def _is_position(self, value: str) -> bool:
        value = _LENGTH.sub("", value)
        names = set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", value))
        known = [code.text(given) for name, given in self.stores if name in names and given]
        return any(_POSITION.search(each) for each in (value, *known))

    def _whole(self, node: cst.CSTNode) -> tuple[cst.CSTNode, bool]:
        """Return the range with `mx.array(…)` and `[None]` around it, and whether the latter is there."""
        call = self._call_of(node)
        if call and code.text(call.func) == "mx.array" and all(map(_integer_type, call.args[1:])):
            node = call
        outer = self.parents[node]
        if isinstance(outer, cst.Subscript) and outer.value is node and _adds_first_axis(outer):
            return outer, True
        return node, False

    def _type(self, node: cst.Call) -> str:
        """Return the type of the numbers in a range, which is numpy's unless it or `mx.array` is told another."""
        call = self._call_of(node)
        outer = call.args[1:] if call and code.text(call.func) == "mx.array" else ()
        for arg in (*outer, *node.args[2:]):
            if found := _integer_type(arg):
                return found["type"]
        return "int64" if _is_numpy(node) else "int32"

    def _is_only_looked_up(self, node: cst.CSTNode) -> bool:
        """Whether ids do nothing but index embeddings, so that their type is of no account."""
        outer = self.parents[node]
        match outer:
            case cst.IfExp():
                return self._is_only_looked_up(outer)
            case cst.Index():
                return True
            case cst.Arg():
                call = self._call_of(node)
                return call is not None and code.text(call.func) in self.embeddings
        uses = self._uses(outer)
        return bool(uses) and all(self._is_only_looked_up(use) for use in uses)

    def _any_rank_will_do(self, node: cst.CSTNode, column: bool = False) -> bool:
        """Whether a value is only computed with number by number, looked up, and applied to hidden states.

        Args:
            node: The ids, `[L]` or `[B, L]`, or what follows from them.
            column: Whether it has an axis more, of length 1, where hidden states have their width.
        """
        outer = self.parents[node]
        match outer:
            case cst.IfExp():
                return outer.test is not node and self._any_rank_will_do(outer, column)
            case cst.BinaryOperation(left=left, right=right):
                other = right if left is node else left
                if _SCALAR.fullmatch(code.text(other)):
                    return self._any_rank_will_do(outer, column)
                return column and self._is_hidden(other)
            case cst.Attribute(attr=cst.Name("astype")):
                return self._any_rank_will_do(self.parents[outer], column)
            case cst.Subscript() if outer.value is node:
                return (
                    not column
                    and code.text(outer).endswith("[..., None]")
                    and self._any_rank_will_do(outer, True)
                )
            case cst.Index() if code.text(self._subscript_of(outer).value).endswith(".weight"):
                return not column and self._is_added(self._subscript_of(outer))
            case cst.Arg():
                return self._call_will_do(node, column)
        uses = self._uses(outer)
        return bool(uses) and all(self._any_rank_will_do(use, column) for use in uses)

    def _call_will_do(self, node: cst.CSTNode, column: bool) -> bool:
        call = self._call_of(node)
        if call is None:
            return False
        function = code.text(call.func)
        if function in self.embeddings:
            return not column and self._is_added(call)
        return len(call.args) == 1 and function in _ELEMENTWISE and self._any_rank_will_do(call, column)

    def _is_hidden(self, value: cst.BaseExpression) -> bool:
        """Whether a name holds hidden states `[B, L, D]`, as embedded tokens are."""
        given = [given for name, given in self.stores if name == code.text(value)]
        return any(isinstance(each, cst.Call) and code.text(each.func) in self.embeddings for each in given)

    def _is_added(self, node: cst.CSTNode) -> bool:
        outer = self.parents[node]
        if isinstance(outer, cst.BinaryOperation | cst.AugAssign):
            return isinstance(outer.operator, cst.Add | cst.AddAssign)
        uses = self._uses(outer)
        return bool(uses) and all(self._is_added(use) for use in uses)

    def _uses(self, assignment: cst.CSTNode) -> list[cst.Name]:
        """Return where a name that is set here is read; nothing for any other statement, or if it is read before."""
        if not isinstance(assignment, cst.Assign) or len(assignment.targets) != 1:
            return []
        target = assignment.targets[0].target
        nodes = list(code.walk(self.function))
        uses = [
            (place, node)
            for place, node in enumerate(nodes)
            if isinstance(node, cst.Name)
            and isinstance(target, cst.Name)
            and node.value == target.value
            and not self._is_no_read(node)
        ]
        own = set(code.walk(assignment.value))
        here = nodes.index(assignment)
        return [] if any(place < here or node in own for place, node in uses) else [node for _, node in uses]

    def _is_no_read(self, name: cst.Name) -> bool:
        outer = self.parents[name]
        return isinstance(outer, cst.AssignTarget) or (
            isinstance(outer, cst.Attribute) and outer.attr is name
        )

    def _call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """Return the call whose first argument a node is."""
        argument = self.parents[node]
        call = self.parents[argument]
        if isinstance(argument, cst.Arg) and isinstance(call, cst.Call) and call.args[0] is argument:
            return call
        return None

    def _subscript_of(self, index: cst.Index) -> cst.Subscript:
        subscript = self.parents[self.parents[index]]
        assert isinstance(subscript, cst.Subscript)
        return subscript

    def _stands_alone(self, node: cst.CSTNode) -> bool:
        return isinstance(self.parents[node], cst.Assign | cst.Arg | cst.Index)


def _embeddings(tree: cst.Module) -> set[str]:
    return {
        code.text(node.targets[0].target)
        for node in code.walk(tree)
        if isinstance(node, cst.Assign)
        and isinstance(node.value, cst.Call)
        and code.text(node.value.func) == "nn.Embedding"
    }


def _integer_type(arg: cst.Arg) -> re.Match[str] | None:
    return _INTEGERS.fullmatch(re.sub(r"[\s,]", "", code.text(arg)))


def _is_numpy(node: cst.CSTNode) -> bool:
    """Whether a range is numpy's, which computes with other types than MLX."""
    return isinstance(node, cst.Call) and code.text(node.func) in ("np.arange", "numpy.arange")


def _adds_first_axis(subscript: cst.Subscript) -> bool:
    return re.sub(r"[\s]", "", code.text(subscript)).endswith(("[None]", "[None,:]"))


def _in_parentheses(value: cst.BaseExpression) -> cst.BaseExpression:
    return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _without_unused_numpy(tree: cst.Module) -> cst.Module:
    """Return the module without `import numpy as np` if nothing else needs it."""
    names = [node for node in code.walk(tree) if isinstance(node, cst.Name) and node.value == "np"]
    if len(names) != 1:
        return tree
    imports = [s for s in tree.body if code.text(s) == "import numpy as np"]
    return code.replaced(tree, {line: cst.RemoveFromParent() for line in imports})
