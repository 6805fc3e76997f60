"""Experts chosen in the graph instead of by ids that the host reads."""

from __future__ import annotations

import re

import libcst as cst

from mlx_audit.adapters.patching import code
from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.adapters.patching.statements import block, said, written

_LOOP = re.compile(
    r"(?P<y>\w+) = \[\]\n"
    r"for (?P<xt>\w+), (?P<st>\w+), (?P<it>\w+) in zip\((?P<x>\w+), (?P<s>\w+), (?P<inds>\w+)\.tolist\(\)\):\n"
    r" +(?P<yt>\w+) = mx\.stack\("
    r"\[(?P<experts>self\.\w+)\[(?P<e>\w+)\]\((?P=xt)\) for (?P=e) in (?P=it)\], axis=-1\)\n"
    r" +(?P=yt) = \((?P=yt) \* (?P=st)\)\.sum\(axis=-1\)\n"
    r" +(?P=y)\.append\((?P=yt)\)\n"
    r"(?P=y) = mx\.stack\((?P=y), axis=0\)"
)

_GATHERED = """\
# The ids of the experts stay on the device, so each expert reads each token
{y} = mx.stack([expert({x}) for expert in {experts}], axis=-1)
{y} = mx.take_along_axis({y}, {inds}[:, None], axis=-1)
{y} = ({y} * {s}[:, None]).sum(axis=-1)
"""


class ExpertsOnDevice(Codemod):
    """Takes the outputs of the chosen experts by their ids, without reading these on the host.

        for xt, st, it in zip(x, scores, inds.tolist()):                     before
            yt = mx.stack([self.experts[e](xt) for e in it], axis=-1)
            yt = (yt * st).sum(axis=-1)

        y = mx.stack([expert(x) for expert in self.experts], axis=-1)        after
        y = mx.take_along_axis(y, inds[:, None], axis=-1)
        y = (y * scores[:, None]).sum(axis=-1)

    A single token gets bit for bit what it got: the same products, summed in the order of the ids. The tokens of a
    prompt go through each expert together, where a matrix product may sum in another order (class `reordered`).

    Parameters keep their names and forms, so every checkpoint still loads. The price: a step reads all experts, not
    the chosen ones alone. Where that counts, stack them in a checkpoint of your own and use `SwitchGLU`.
    """

    name = "experts_on_device"
    mends = ("SRC005",)

    def apply(self, tree: cst.Module) -> cst.Module:
        lists = _lists_of_modules(tree)
        changes: dict[cst.CSTNode, code.Change] = {}
        for function in code.functions(tree):
            for body in map(block, code.walk(function)):
                for at in range(len(body) - 2):
                    loop = body[at : at + 3]
                    found = _LOOP.fullmatch(said(*loop)) if isinstance(loop[1], cst.For) else None
                    if found and found["experts"] in lists and _understood(function, loop, found):
                        gathered = written(_GATHERED.format(**found.groupdict()), loop[0])
                        changes[loop[0]] = cst.FlattenSentinel(gathered)
                        changes |= {line: cst.RemoveFromParent() for line in loop[1:]}
        return code.replaced(tree, changes)


def _lists_of_modules(tree: cst.Module) -> set[str]:
    """Return the attributes that are set to a list, written as a comprehension."""
    return {
        code.text(node.targets[0].target)
        for node in code.walk(tree)
        if isinstance(node, cst.Assign) and isinstance(node.value, cst.ListComp)
    }


def _understood(function: cst.FunctionDef, loop: list[cst.BaseStatement], found: re.Match[str]) -> bool:
    """Return whether tokens are rows of a matrix, and nothing else reads what the loop sets."""
    tokens = [code.text(value) for name, value in code.stores(function) if name == found["x"] and value]
    flat = len(tokens) == 1 and re.fullmatch(r"(\w+)\.reshape\(-1, \1\.shape\[-1\]\)", tokens[0])
    own = {found["xt"], found["st"], found["it"], found["yt"]}
    return bool(flat) and found["x"] != "expert" and _count(own, function) == _count(own, *loop)


def _count(names: set[str], *nodes: cst.CSTNode) -> int:
    return sum(
        isinstance(each, cst.Name) and each.value in names for node in nodes for each in code.walk(node)
    )
