"""The position of queries that attend to the keys of another layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod

_OFFSET = "offset"
_KEYS_AXES = (2, -2)
_TOKENS_AXES = (1, 2, -2)


class PositionOfReusedKeys(Codemod):
    """Hands the offset of the cache to layers that reuse its keys, and took their position from the length of these.

        _, _, S, _ = keys.shape                               before
        queries = self.rope(queries, offset=S - L)

        queries = self.rope(queries, offset=offset)           after

    The offset is read before the layers update the cache: there it is S - L for keys that grow with the tokens, while
    S of a buffer of fixed capacity is the capacity. All calls in between hand it on, or nothing is changed; and all of
    them hand on the keys of all tokens and what was made of all the tokens that the step gave to the cache.
    """

    name = "position_of_reused_keys"
    mends = ("SRC002",)

    def apply(self, tree: cst.Module) -> cst.Module:
        changes: dict[cst.CSTNode, code.Change] = {}
        for owner in tree.body:
            method = _call_method(owner)
            reuse = _reuse(method) if method else None
            if isinstance(owner, cst.ClassDef) and method and reuse:
                way = _Way(tree)
                if way.gives(owner, method, reuse.keys, reuse.tokens):
                    changes |= {**way.changes, reuse.position: cst.Name(_OFFSET)}
                    if reuse.unneeded:
                        changes[reuse.unneeded] = cst.RemoveFromParent()
        return code.replaced(tree, changes)


@dataclass(frozen=True)
class _Reuse:
    """`offset=S - L` in a method that is given the keys."""

    keys: str
    tokens: str
    position: cst.BinaryOperation
    unneeded: cst.CSTNode | None
    """The statement that S comes from, if nothing else needs it."""


def _reuse(method: cst.FunctionDef) -> _Reuse | None:
    if {_OFFSET, "cache"} & {*_parameters(method), *(name for name, _ in code.stores(method))}:
        return None
    for argument in code.walk(method):
        match argument:
            case cst.Arg(
                cst.BinaryOperation(left, cst.Subtract(), right) as position, keyword=cst.Name("offset")
            ):
                keys, axis, line = _length(method, left)
                tokens, tokens_axis, _ = _length(method, right)
                if (
                    {keys, tokens} <= {*_parameters(method)}
                    and axis in _KEYS_AXES
                    and tokens != keys
                    and tokens_axis in _TOKENS_AXES
                ):
                    return _Reuse(
                        keys, tokens, position, line if line and _reads(method, left) == 1 else None
                    )
    return None


def _length(
    method: cst.FunctionDef, value: cst.BaseExpression
) -> tuple[str, int | None, cst.SimpleStatementLine | None]:
    """Return the array and the axis whose length a value is, and the statement if it does nothing but name it."""
    if not isinstance(value, cst.Name):
        return (*_axis_of_shape(value), None)
    found: list[tuple[str, int | None, cst.SimpleStatementLine | None]] = []
    for line in code.walk(method):
        match line:
            case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], given)]):
                if name == value.value:
                    found.append((*_axis_of_shape(given), line))
            case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Tuple(elements))], given)]):
                names = [code.text(element.value) for element in elements]
                array, dot, _ = code.text(given).rpartition(".shape")
                if value.value in names and dot:
                    alone = {*names} <= {value.value, "_"}
                    found.append((array, names.index(value.value), line if alone else None))
    bound = [name for name, _ in code.stores(method)].count(value.value)
    return found[0] if len(found) == bound == 1 else ("", None, None)


def _axis_of_shape(value: cst.BaseExpression) -> tuple[str, int | None]:
    array, dot, index = code.text(value).rpartition(".shape[")
    axis = index.removesuffix("]")
    return (array, int(axis)) if dot and axis.lstrip("-").isdigit() else ("", None)


def _reads(method: cst.FunctionDef, value: cst.BaseExpression) -> int:
    names = [node.value for node in code.walk(method) if isinstance(node, cst.Name)]
    return names.count(code.text(value)) - 1


class _Way:
    """The way of an offset from the cache to a method, through all that call it."""

    def __init__(self, tree: cst.Module) -> None:
        self.tree = tree
        self.parents = code.parents(tree)
        self.changes: dict[cst.CSTNode, code.Change] = {}

    def gives(self, owner: cst.ClassDef, method: cst.FunctionDef, keys: str, tokens: str) -> bool:
        """Add the parameter to a method and the argument to its calls; whether all are known and can have it."""
        if method.params in self.changes:
            return True
        needed = [parameter.name.value for parameter in method.params.params if parameter.default is None]
        if not {keys, tokens} <= {*needed} or _is_set(method, keys) or _is_cut(method, tokens):
            return False
        self.changes[method.params] = self._with_offset(method.params, len(needed))
        calls = self._calls(owner.name.value)
        return bool(calls) and all(
            self._passes(*call, len(needed) - 1, needed.index(keys) - 1, needed.index(tokens) - 1)
            for call in calls
        )

    def _with_offset(self, parameters: cst.Parameters, place: int) -> cst.Parameters:
        """Return the parameters with the offset after those without a default, laid out like the one before it."""
        before = parameters.params[:place]
        typed = before[-1].annotation and "Any" in code.names(self.tree)
        annotation = cst.Annotation(cst.Name("Any")) if typed else None
        offset = before[-1].with_changes(name=cst.Name(_OFFSET), annotation=annotation)
        return parameters.with_changes(params=[*before, offset, *parameters.params[place:]])

    def _calls(self, name: str) -> list[tuple[cst.ClassDef, cst.FunctionDef, cst.Call]]:
        """Return the calls of a class's instances with the methods they stand in; none if one is not understood."""
        calls = []
        for owner in self.tree.body:
            method = _call_method(owner)
            for use in code.walk(owner):
                if (
                    isinstance(use, cst.Name)
                    and use.value == name
                    and self.parents[use] is not self._class(name)
                ):
                    attribute = self._attribute(use)
                    found = _calls_of(method, attribute) if method and attribute else []
                    if not found or not isinstance(owner, cst.ClassDef) or not method:
                        return []
                    calls += [(owner, method, call) for call in found]
        return calls

    def _class(self, name: str) -> cst.ClassDef:
        return next(
            node for node in self.tree.body if isinstance(node, cst.ClassDef) and node.name.value == name
        )

    def _attribute(self, use: cst.Name) -> str:
        """Return `self.a` for `self.a = Class(…)` and `self.a = [Class(…) for …]`."""
        made = self.parents[use]
        holder = self.parents[made]
        if isinstance(holder, cst.ListComp):
            holder = self.parents[holder]
        if isinstance(made, cst.Call) and isinstance(holder, cst.Assign) and len(holder.targets) == 1:
            target = code.text(holder.targets[0].target)
            return target if target.startswith("self.") else ""
        return ""

    def _passes(
        self, owner: cst.ClassDef, method: cst.FunctionDef, call: cst.Call, place: int, keys: int, tokens: int
    ) -> bool:
        before = call.args[:place]
        if len(before) < place or any(arg.star or arg.keyword for arg in before):
            return False
        offset = cst.Arg(cst.Name(_OFFSET), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        last = before[-1].with_changes(comma=offset.comma)
        if place == len(call.args):
            offset = cst.Arg(cst.Name(_OFFSET))
        self.changes[call] = call.with_changes(args=[*before[:-1], last, offset, *call.args[place:]])
        given, states = code.text(call.args[keys].value), _whole(call.args[tokens].value)
        if given in _parameters(method):
            return _OFFSET not in code.names(method) and self.gives(owner, method, given, states)
        return states != "" and not _is_cut(method, states) and self._reads_offset(method, given)

    def _reads_offset(self, method: cst.FunctionDef, keys: str) -> bool:
        """Read the offset before the first loop over the caches, which must precede the reading of the keys."""
        if _OFFSET in code.names(method):
            return False
        lines = list(method.body.body)
        sources = [(place, _cache_of(line, keys)) for place, line in enumerate(lines)]
        sources = [(place, cache) for place, cache in sources if cache]
        loops = [place for place, line in enumerate(lines) if _goes_through_caches(line)]
        if (
            len(sources) != 1
            or not loops
            or sources[0][0] < loops[0]
            or [name for name, _ in code.stores(method)].count(keys) != 1
            or any(map(_updates, lines[: loops[0]]))
        ):
            return False
        line = cst.parse_statement(f"{_OFFSET} = {sources[0][1]}.offset\n")
        self.changes[lines[loops[0]]] = cst.FlattenSentinel([line, lines[loops[0]]])
        return True


def _is_set(method: cst.FunctionDef, name: str) -> bool:
    return name in [stored for stored, _ in code.stores(method)]


def _whole(value: cst.BaseExpression) -> str:
    """Return the name of the hidden states that are given as they are, or normed; nothing for anything else."""
    match value:
        case cst.Name(name):
            return name
        case cst.Call(func=cst.Attribute(value=cst.Name("self")), args=[cst.Arg(cst.Name(name))]):
            return name
    return ""


def _is_cut(method: cst.FunctionDef, name: str) -> bool:
    """Whether a name may at some place hold fewer tokens than at another."""
    values = [value for stored, value in code.stores(method) if stored == name]
    return any(
        value is None
        or any(isinstance(node, cst.Subscript) for node in code.walk(value))
        or code.text(value).startswith("mx.")
        for value in values
    )


def _call_method(owner: cst.CSTNode) -> cst.FunctionDef | None:
    if isinstance(owner, cst.ClassDef):
        for node in owner.body.body:
            if isinstance(node, cst.FunctionDef) and node.name.value == "__call__":
                return node
    return None


def _parameters(method: cst.FunctionDef) -> list[str]:
    return [parameter.name.value for parameter in method.params.params]


def _calls_of(method: cst.FunctionDef, attribute: str) -> list[cst.Call]:
    """Return the calls of an attribute, or of each of its elements in a loop."""
    callees = [(method.body, attribute)]
    for node in code.walk(method):
        if isinstance(node, cst.For) and code.text(node.iter) == attribute:
            callees.append((node.body, code.text(node.target)))
    return [
        node
        for body, callee in callees
        for node in code.walk(body)
        if isinstance(node, cst.Call) and code.text(node.func) == callee
    ]


def _cache_of(line: cst.CSTNode, keys: str) -> str:
    """Return `cache[-1]` for `keys, values = cache[-1].keys_and_values()`."""
    match line:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Tuple([first, *_]))], value)]):
            cache, call, _ = code.text(value).rpartition(".keys_and_values()")
            return cache if call and code.text(first.value) == keys else ""
    return ""


def _goes_through_caches(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.For) and "cache" in code.names(line.iter)


def _updates(line: cst.CSTNode) -> bool:
    """Whether a statement may update a cache: calls something with one, other than what makes a mask of it."""
    return any(
        isinstance(node, cst.Call)
        and not code.text(node.func).endswith(("_mask", "len", "isinstance"))
        and any("cache" in code.names(arg) for arg in node.args)
        for node in code.walk(line)
    )
