"""The conditions on the configuration under which a place is reached."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

LONGEST_TEXT = 120
_MOST = 40

_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Guard:
    """One condition.

    Attributes:
        text: It, as source.
        opposite: What holds where it does not.
        place: Full name of the class whose object is asked; empty if the test asks none.
        needs: Full name of the class that exists if it holds.
    """

    text: str
    opposite: str
    place: str = ""
    needs: str = field(default="", compare=False)
    lasting: bool = field(default=False, compare=False)
    """Whether it asks attributes of the object alone, so that it has one answer throughout a step."""

    def denies(self, other: Guard) -> bool:
        """Return whether this is the opposite of another condition, word by word."""
        return self.place == other.place and self.text == other.opposite


Conditions = tuple[Guard, ...]
"""Conditions that all hold, the outermost first."""


def guard(test: ast.expr, holds: bool, place: str, needs: str) -> Guard:
    """Return the condition that a test holds, or does not."""
    text, opposite = (text_of(test), _opposite(test)) if holds else (_opposite(test), text_of(test))
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return Guard(text, opposite, place if "self" in names else "", needs, names == {"self"})


def _opposite(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text_of(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITES:
        return text_of(ast.Compare(test.left, [_OPPOSITES[type(test.ops[0])]()], test.comparators))
    text = text_of(test)
    return f"not {text}" if isinstance(test, ast.Name | ast.Attribute | ast.Call) else f"not ({text})"


def possible(conditions: Conditions) -> bool:
    """Return whether no object is asked to answer both yes and no."""
    lasting = [condition for condition in conditions if condition.lasting]
    return not any(one.denies(other) for one in lasting for other in lasting)


def merged(ways: Iterable[Conditions]) -> list[Conditions]:
    """Return the ways to a place, as few as say the same; an empty one means that it is always reached."""
    kept = list(dict.fromkeys(ways))
    if len(kept) > _MOST:
        return [()]
    while True:
        kept = [way for way in kept if not any(set(other) < set(way) for other in kept)]
        pair = next(((a, b) for a in kept for b in kept if _complement(a, b)), None)
        if pair is None:
            return kept
        common = tuple(condition for condition in pair[0] if condition in pair[1])
        kept = list(dict.fromkeys([common, *(way for way in kept if way not in pair)]))


def _complement(one: Conditions, two: Conditions) -> bool:
    """Return whether two ways differ in one condition only, which holds in one and not in the other."""
    only, other = set(one) - set(two), set(two) - set(one)
    return len(only) == len(other) == 1 and only.pop().denies(other.pop())


def needed(way: Conditions) -> str:
    """Return the class that must be built for a way: the innermost, which the others decide about."""
    return next((guard.needs for guard in reversed(way) if guard.needs), "")


def text_of_all(way: Conditions) -> str:
    """Return conditions as one text, in which `self` is an object of the class that is needed."""
    texts = []
    for condition in way:
        owner = condition.place.rpartition(".")[2]
        foreign = owner and condition.place != needed(way)
        texts.append(re.sub(r"\bself\.", f"{owner}.", condition.text) if foreign else condition.text)
    return " and ".join(
        dict.fromkeys(f"({text})" if " or " in text and len(way) > 1 else text for text in texts)
    )


def text_of(node: ast.AST) -> str:
    """Return an expression as source, on one line and not too long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
