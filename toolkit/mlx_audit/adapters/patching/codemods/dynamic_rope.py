"""Dynamic NTK scaling of RoPE for positions that are arrays."""

from __future__ import annotations

import ast
import re

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod

_HELPER = "rope_with_base"
_SOURCE = f"""\
def {_HELPER}(x, dims, *, traditional, base, scale, offset):
    # MLX takes an array only as frequencies, and one set of them for all rows
    exponents = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    if (n := base.size) == 1:
        rows = [(x, base, offset)]
    else:
        rows = [(x[i : i + 1], base[i : i + 1], offset[i : i + 1]) for i in range(n)]
    return mx.concatenate(
        [
            mx.fast.rope(
                row,
                dims,
                traditional=traditional,
                base=None,
                scale=scale,
                offset=start,
                freqs=row_base**exponents,
            )
            for row, row_base, start in rows
        ]
    )
"""
_BASE = re.compile(
    r"(?P<base>[\w.]+) \* \((?P<scale>[\w.]+) \* (?P<length>\w+) / (?P<limit>[\w.]+) - \((?P=scale) - 1\)\)"
    r" \*\* \((?P<dims>[\w.]+) / \((?P=dims) - 2\)\)"
)
_LONGEST_LINE = 88 - 8  # as black has it, in the body of a method


class DynamicRope(Codemod):
    """Computes the base of the rotation on arrays, and hands it to MLX as frequencies.

        seq_len = max(x.shape[-2] + offset, self.limit)                              before
        base = self.base * ((self.factor * seq_len / self.limit) - (self.factor - 1)) ** …
        return mx.fast.rope(x, self.dims, …, base=base, offset=offset)

        seq_len = mx.maximum(mx.array(x.shape[-2] + offset, mx.float32), self.limit)  after
        base = …
        return rope_with_base(x, self.dims, …, base=base, offset=offset)

    The same formula, in float32 instead of the host's floats. An int offset goes the same way as an array: the compiled
    step is exactly the patched eager one, and both agree with the unpatched one up to rounding (`reordered`). Two ways
    would differ by it, which far positions multiply. Rows with positions of their own have bases of their own.

    Only of this formula is it known what float32 makes of it: integers of the host have no limit where those of arrays
    wrap around, squares of positions are not exact, and a test of what was rounded may fall on the other side.
    """

    name = "dynamic_rope"
    mends = ("SRC001",)

    def apply(self, tree: cst.Module) -> cst.Module:
        if _HELPER in code.names(tree):
            return tree
        changes: dict[cst.CSTNode, code.Change] = {}
        places = []
        for place, owner in enumerate(tree.body):
            for method in owner.body.body if isinstance(owner, cst.ClassDef) else ():
                if isinstance(method, cst.FunctionDef) and (mended := _Rotation(method).changes()):
                    changes |= mended
                    places.append(place)
        body = list(code.replaced(tree, changes).body)
        return tree.with_changes(body=[*body[: places[0]], _helper(), *body[places[0] :]]) if places else tree


def _helper() -> cst.BaseStatement:
    blank = cst.EmptyLine(indent=False)
    return cst.parse_statement(_SOURCE).with_changes(leading_lines=[blank, blank])


class _Rotation:
    """A method that rotates with a base that depends on the offset."""

    def __init__(self, method: cst.FunctionDef) -> None:
        self.method = method
        self.length = ""
        """The name of the position after the tokens."""
        self.values: dict[str, str] = {}
        """What follows from it, by the names that are set to it."""

    def changes(self) -> dict[cst.CSTNode, code.Change]:
        """Return what to change; nothing if a part is not understood."""
        rope = _call(self.method)
        if rope is None:
            return {}
        changes: dict[cst.CSTNode, code.Change] = {rope.func: cst.Name(_HELPER)}
        for line in self.method.body.body[:-1]:
            if self._dependent & code.names(line):
                change = self._on_arrays(line)
                if change is None:
                    return {}
                changes[line] = change
        others = [arg for arg in rope.args if not (arg.keyword and arg.keyword.value in ("base", "offset"))]
        depend = any(self._dependent & code.names(arg.value) for arg in others)
        return changes if self._formula(self.values.get("base", "")) and not depend else {}

    @property
    def _dependent(self) -> set[str]:
        return {"offset", self.length, *self.values}

    def _on_arrays(self, line: cst.CSTNode) -> code.Change | None:
        """Return a statement on arrays, itself where it already is; None if it is not understood."""
        name, value = _assigned(line)
        if isinstance(line, cst.If):
            return self._chosen(line)
        if value is None or not self._is_new(name, 1) or not isinstance(line, cst.SimpleStatementLine):
            return None
        if "offset" not in code.names(value):
            if not _is_arithmetic(value):
                return None
            self.values[name] = self._inlined(value)
            return line
        position = _position(value)
        if self.length or not position:
            return None
        self.length = name
        source = f"{name} = {position}\n"
        if len(source) > _LONGEST_LINE:
            source = source.replace("(", "(\n    ", 1).removesuffix(")\n") + "\n)\n"
        statement = cst.parse_statement(source)
        assert isinstance(statement, cst.SimpleStatementLine)
        return line.with_changes(body=statement.body)

    def _chosen(self, line: cst.If) -> code.Change | None:
        """Return `base = …` and its choice by `mx.where`: of the formula beyond its limit, else of the base itself."""
        match line.body, line.orelse:
            case cst.IndentedBlock([first]), cst.Else(cst.IndentedBlock([last])):
                (name, value), (other, plain) = _assigned(first), _assigned(last)
            case _:
                return None
        if value is None or plain is None or name != other or not self._is_new(name, 2):
            return None
        found, test = self._formula(self._inlined(value)), code.text(line.test)
        if found is None or code.text(plain) != found["base"]:
            return None
        if test not in [f"{self.length} {than} {found['limit']}" for than in (">", ">=")]:
            return None
        self.values[name] = found[0]
        choice = cst.parse_statement(_where(name, test, found["base"]))
        return cst.FlattenSentinel([first.with_changes(leading_lines=line.leading_lines), choice])

    def _is_new(self, name: str, times: int) -> bool:
        """Whether a name is set this often, all in all, so that it held nothing before."""
        stored = [stored for stored, _ in code.stores(self.method)]
        parameters = [*self.method.params.params, *self.method.params.kwonly_params]
        return stored.count(name) == times and name not in [each.name.value for each in parameters]

    def _formula(self, value: str) -> re.Match[str] | None:
        """Return the parts of the known formula, of which the length alone depends on the offset."""
        found = _BASE.fullmatch(value)
        parts = found.groups() if found else ()
        return found if found and found["length"] == self.length and parts.count(self.length) == 1 else None

    def _inlined(self, value: cst.BaseExpression) -> str:
        """Return an expression with the names exchanged for what they stand for."""
        source = code.text(value)
        for name, known in self.values.items():
            source = re.sub(rf"(?<![.\w]){name}\b", f"({known})", source)
        return ast.unparse(ast.parse(source))


def _call(method: cst.FunctionDef) -> cst.Call | None:
    """Return the call of `mx.fast.rope` that ends a method and takes the base and the offset by their names."""
    match method.body.body[-1]:
        case cst.SimpleStatementLine([cst.Return(cst.Call() as call)]) if (
            code.text(call.func) == "mx.fast.rope"
        ):
            given = {arg.keyword.value: code.text(arg.value) for arg in call.args if arg.keyword}
            if given.get("base") == "base" and given.get("offset") == "offset" and "freqs" not in given:
                return call
    return None


def _assigned(line: cst.CSTNode) -> tuple[str, cst.BaseExpression | None]:
    match line:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value)]):
            return name, value
    return "", None


def _position(value: cst.BaseExpression) -> str:
    """Return a sum with the offset, or the larger of one and a limit, as an array; nothing for anything else."""
    match value:
        case cst.Call(
            func=cst.Name("max"), args=[cst.Arg(sum_, keyword=None, star=""), cst.Arg(limit) as last]
        ):
            plain = re.fullmatch(r"[\w.]+", code.text(limit)) and not last.keyword and not last.star
            inner = _position(sum_) if plain and isinstance(sum_, cst.BinaryOperation) else ""
            return (
                f"mx.maximum({inner}, {code.text(limit)})"
                if inner and "offset" not in code.names(limit)
                else ""
            )
    return f"mx.array({code.text(value)}, mx.float32)" if _is_sum(value) else ""


def _is_arithmetic(value: cst.BaseExpression) -> bool:
    unclear = (cst.Call, cst.IfExp, cst.BooleanOperation, cst.NamedExpr, cst.Lambda)
    return not any(isinstance(node, unclear) for node in code.walk(value))


def _is_sum(value: cst.BaseExpression) -> bool:
    """Whether a value is the offset plus lengths and numbers."""
    if isinstance(value, cst.BinaryOperation):
        return isinstance(value.operator, cst.Add) and _is_sum(value.left) and _is_sum(value.right)
    return re.fullmatch(r"offset|\d+|[\w.]+(\.shape\[-?\d+\])?", code.text(value)) is not None


def _where(name: str, test: str, plain: str) -> str:
    inside = f"{test}, {name}, {plain}"
    line = f"{name} = mx.where({inside})\n"
    return line if len(line) <= _LONGEST_LINE else f"{name} = mx.where(\n    {inside}\n)\n"
