"""Boolean masks that hide scores instead of raising them by one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class MaskApplied(Codemod):
    """Applies a boolean mask with `where`, as mlx-lm's gemma2 does; a mask of floats is added as before.

        scores += mask                                                       before

        if mask.dtype == mx.bool_:                                           after
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        else:
            scores += mask

    A boolean that is added hides nothing. In eager decoding nobody notices: the mask of a single token is None. The
    mask of a prompt is the word "causal" unless an array is asked for, and a word can neither be added nor applied: so
    one is asked for. Nothing else changes for None and for floats.
    """

    name = "mask_applied"
    mends = ("SRC003",)

    def apply(self, tree: cst.Module) -> cst.Module:
        changes: dict[cst.CSTNode, cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]] = {}
        for function in code.functions(tree):
            for line, scores, mask in _additions(function):
                changes[line] = cst.FlattenSentinel(_applied(function, line, scores, mask))
        return code.replaced(tree, {**changes, **_arrays_asked_for(tree)}) if changes else tree


def _additions(function: cst.FunctionDef) -> Iterator[tuple[cst.SimpleStatementLine, str, str]]:
    """Yield each statement that adds a mask to what becomes a softmax, with the names of both."""
    masks = {
        parameter.name.value
        for parameter in (*function.params.params, *function.params.kwonly_params)
        if "mask" in parameter.name.value
    }
    body = code.text(function.body)
    for line in code.walk(function):
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            scores, mask = _sum(line.body[0])
            if (
                mask in masks
                and re.search(rf"softmax\({scores}\b", body)
                and f"{mask}.dtype" not in body
                and ("expand_dims(" not in body or _is_read_once(function, mask))
            ):
                yield line, scores, mask


def _is_read_once(function: cst.FunctionDef, mask: str) -> bool:
    """Whether a mask is added and compared with None alone, so that nothing else sees the axis that it is given."""
    compared = [node for node in code.walk(function.body) if isinstance(node, cst.Comparison)]
    count = _count(mask, function.body) - sum(_count(mask, node) for node in compared)
    return count == 1


def _sum(statement: cst.BaseSmallStatement) -> tuple[str, str]:
    """Return the two names of `scores += mask` or `scores = scores + mask`, or two empty ones."""
    match statement:
        case cst.AugAssign(cst.Name(scores), cst.AddAssign(), cst.Name(mask)):
            return scores, mask
        case cst.Assign(
            [cst.AssignTarget(cst.Name(scores))],
            cst.BinaryOperation(cst.Name(left), cst.Add(), cst.Name(right)),
        ) if scores in (left, right):
            return scores, right if scores == left else left
    return "", ""


def _count(name: str, node: cst.CSTNode) -> int:
    return sum(isinstance(each, cst.Name) and each.value == name for each in code.walk(node))


def _applied(
    function: cst.FunctionDef, line: cst.SimpleStatementLine, scores: str, mask: str
) -> list[cst.CSTNode]:
    choice = cst.parse_statement(
        f"if {mask}.dtype == mx.bool_:\n"
        f"    {scores} = mx.where({mask}, {scores}, mx.finfo({scores}.dtype).min)\n"
        "else:\n"
        "    pass\n"
    )
    assert isinstance(choice, cst.If)
    assert isinstance(choice.orelse, cst.Else)
    addition = cst.IndentedBlock([line.with_changes(leading_lines=[])])
    choice = choice.with_changes(orelse=choice.orelse.with_changes(body=addition))
    if "expand_dims(" not in code.text(function.body):
        return [choice.with_changes(leading_lines=line.leading_lines)]
    # The scores of grouped queries have an axis more than the mask of a batch.
    spread = cst.parse_statement(
        f"if 3 < {mask}.ndim < {scores}.ndim:\n    {mask} = mx.expand_dims({mask}, -3)\n"
    )
    return [spread.with_changes(leading_lines=line.leading_lines), choice]


def _arrays_asked_for(tree: cst.Module) -> dict[cst.CSTNode, cst.CSTNode]:
    calls = [
        node
        for node in code.walk(tree)
        if isinstance(node, cst.Call) and code.text(node.func) == "create_attention_mask"
    ]
    array = cst.Arg(
        keyword=cst.Name("return_array"),
        value=cst.Name("True"),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    return {
        call: call.with_changes(args=[*call.args, array])
        for call in calls
        if len(call.args) < 4
        and not any(a.star or (a.keyword and a.keyword.value == "return_array") for a in call.args)
    }
