"""Dynamic NTK scaling of RoPE for positions that are arrays."""

from __future__ import annotations

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
_LONGEST_LINE = 88 - 8  # as black has it, in the body of a method


class DynamicRope(Codemod):
    """Computes the base of the rotation on arrays, and hands it to MLX as frequencies.

        seq_len = max(x.shape[-2] + offset, self.max_position_embeddings)            before
        return mx.fast.rope(x, self.dims, …, base=base, offset=offset)

        seq_len = mx.maximum(x.shape[-2] + offset, self.max_position_embeddings)     after
        return rope_with_base(x, self.dims, …, base=base, offset=offset)

    The same formula, in float32 instead of the host's floats. An int offset goes the same way as an array: the compiled
    step is exactly the patched eager one, and both agree with the unpatched one up to rounding (`reordered`). Two ways
    would differ by it, which far positions multiply. Rows with positions of their own have bases of their own.
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
                if isinstance(method, cst.FunctionDef) and (mended := _mended(method)):
                    changes |= mended
                    places.append(place)
        body = list(code.replaced(tree, changes).body)
        return tree.with_changes(body=[*body[: places[0]], _helper(), *body[places[0] :]]) if places else tree


def _helper() -> cst.BaseStatement:
    blank = cst.EmptyLine(indent=False)
    return cst.parse_statement(_SOURCE).with_changes(leading_lines=[blank, blank])


def _mended(method: cst.FunctionDef) -> dict[cst.CSTNode, code.Change]:
    """Return what to change in a rotation whose base depends on the offset; nothing if a part is not understood."""
    rope = _rotation(method)
    if rope is None:
        return {}
    changes: dict[cst.CSTNode, code.Change] = {rope.func: cst.Name(_HELPER)}
    dependent = {"offset"}
    for line in method.body.body[:-1]:
        if dependent & code.names(line):
            name, change = _on_arrays(line)
            if not name:
                return {}
            dependent.add(name)
            if change:
                changes[line] = change
    return changes if "base" in dependent else {}


def _rotation(method: cst.FunctionDef) -> cst.Call | None:
    """Return the call of `mx.fast.rope` that ends a method and takes the base and the offset by their names."""
    match method.body.body[-1]:
        case cst.SimpleStatementLine([cst.Return(cst.Call() as call)]) if (
            code.text(call.func) == "mx.fast.rope"
        ):
            given = {arg.keyword.value: code.text(arg.value) for arg in call.args if arg.keyword}
            if given.get("base") == "base" and given.get("offset") == "offset" and "freqs" not in given:
                return call
    return None


def _on_arrays(line: cst.CSTNode) -> tuple[str, code.Change | None]:
    """Return the name that a statement sets, and the statement on arrays; no name if it is not understood."""
    match line:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value) as assign]):
            array = _array(value)
            if array is None:
                return "", None
            return name, line.with_changes(body=[assign.with_changes(value=array)])
        case cst.If(
            cst.Comparison() as test,
            cst.IndentedBlock(
                [cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], scaled)])]
            ),
            orelse=cst.Else(
                cst.IndentedBlock(
                    [cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(other))], plain)])]
                )
            ),
        ) if name == other and "offset" not in code.names(line) and _is_arithmetic(test, scaled, plain):
            both = line.body.body[0].with_changes(leading_lines=line.leading_lines)
            choice = cst.parse_statement(_where(name, code.text(test), code.text(plain)))
            return name, cst.FlattenSentinel([both, choice])
    return "", None


def _array(value: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return a value that depends on the offset, or on an array that does, as an array; None if it is not understood.

    What follows from a sum with the offset is arithmetic of arrays; only the sum itself can still be an int.
    """
    if isinstance(value, cst.Call) and code.text(value.func) == "max" and _is_arithmetic(*value.args):
        return value.with_changes(func=cst.parse_expression("mx.maximum"))
    if not _is_arithmetic(value):
        return None
    if "offset" not in code.names(value):
        return value
    return cst.parse_expression(f"mx.array({code.text(value)})") if _is_sum(value) else None


def _is_arithmetic(*values: cst.CSTNode) -> bool:
    unclear = (cst.Call, cst.IfExp, cst.BooleanOperation)
    return not any(isinstance(node, unclear) for value in values for node in code.walk(value))


def _is_sum(value: cst.BaseExpression) -> bool:
    if isinstance(value, cst.BinaryOperation):
        return isinstance(value.operator, cst.Add) and _is_sum(value.left) and _is_sum(value.right)
    return True


def _where(name: str, test: str, plain: str) -> str:
    inside = f"{test}, {name}, {plain}"
    line = f"{name} = mx.where({inside})\n"
    return line if len(line) <= _LONGEST_LINE else f"{name} = mx.where(\n    {inside}\n)\n"
