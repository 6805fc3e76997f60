"""Dynamic NTK scaling of RoPE for positions that are arrays."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod

_HELPER = "rope_with_base"
_SOURCE = f"""

def {_HELPER}(x, dims, *, traditional, base, scale, offset):
    if not isinstance(base, mx.array):
        return mx.fast.rope(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset
        )
    # MLX takes an array only as frequencies, and one set of them for all rows
    exponents = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    rows = [(x, base, offset)]
    if (n := offset.size) > 1:
        rows = zip(x.split(n), base.split(n), offset.split(n))
    return mx.concatenate(
        [
            mx.fast.rope(
                x,
                dims,
                traditional=traditional,
                base=None,
                scale=scale,
                offset=offset,
                freqs=base**exponents,
            )
            for x, base, offset in rows
        ]
    )
"""
_LONGEST_LINE = 88 - 12  # as black has it, in the body of a condition in a method


class DynamicRope(Codemod):
    """Computes the base of the rotation on arrays where the offset is one, and hands it to MLX as frequencies.

        seq_len = max(x.shape[-2] + offset, self.max_position_embeddings)            before
        return mx.fast.rope(x, self.dims, …, base=base, offset=offset)

        if isinstance(offset, mx.array):                                             after
            seq_len = mx.maximum(x.shape[-2] + offset, self.max_position_embeddings)
        else:
            seq_len = max(x.shape[-2] + offset, self.max_position_embeddings)
        return rope_with_base(x, self.dims, …, base=base, offset=offset)

    An int takes the old path, bit for bit. For arrays it is the same formula in float32, so the compiled step agrees
    with eager decoding up to rounding. Rows with positions of their own have bases of their own, and are rotated one
    by one: MLX takes one set of frequencies.
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
    if rope is None or "isinstance(offset" in code.text(method.body):
        return {}
    changes: dict[cst.CSTNode, code.Change] = {rope.func: cst.Name(_HELPER)}
    dependent = {"offset"}
    for line in method.body.body:
        if not dependent & code.names(line) or rope in code.walk(line):
            continue
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


def _on_arrays(line: cst.CSTNode) -> tuple[str, cst.If | None]:
    """Return the name that a statement sets, and its form for both; no name if it is not understood."""
    match line:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(name))], value) as assign]):
            if _is_arithmetic(value):
                return name, None
            if isinstance(value, cst.Call) and code.text(value.func) == "max" and _is_arithmetic(*value.args):
                largest = value.with_changes(func=cst.parse_expression("mx.maximum"))
                bare = line.with_changes(leading_lines=[])
                arrays = bare.with_changes(body=[assign.with_changes(value=largest)])
                old = cst.Else(cst.IndentedBlock([bare]))
                return name, _if_array([arrays], old, line.leading_lines)
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
        ) if name == other and _is_arithmetic(test, scaled, plain):
            chosen = cst.parse_statement(_where(name, code.text(test), code.text(plain)))
            otherwise = line.with_changes(leading_lines=[])
            return name, _if_array([*line.body.body, chosen], otherwise, line.leading_lines)
    return "", None


def _is_arithmetic(*values: cst.CSTNode) -> bool:
    return not any(isinstance(node, cst.Call) for value in values for node in code.walk(value))


def _if_array(
    body: Sequence[cst.BaseStatement], old: cst.If | cst.Else, leading_lines: Sequence[cst.EmptyLine]
) -> cst.If:
    return cst.If(
        cst.parse_expression("isinstance(offset, mx.array)"),
        cst.IndentedBlock(body),
        old,
        leading_lines=leading_lines,
    )


def _where(name: str, test: str, plain: str) -> str:
    inside = f"{test}, {name}, {plain}"
    line = f"{name} = mx.where({inside})\n"
    return line if len(line) <= _LONGEST_LINE else f"{name} = mx.where(\n    {inside}\n)\n"
