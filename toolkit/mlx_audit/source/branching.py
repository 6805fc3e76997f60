"""Which branches a test may take."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from mlx_audit.source.conditions import Conditions, guard
from mlx_audit.source.construction import full_name
from mlx_audit.source.events import Tested
from mlx_audit.source.judging import truth
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.tags import Tag
from mlx_audit.source.values import Instance


def branch(
    machine: Machine, test: ast.expr, body: Any, orelse: Any, frame: Frame
) -> Iterator[tuple[Any, Conditions]]:
    """Yield the branches that a test may take, each with the conditions under which it does."""
    value = machine.value(test, frame)
    machine.tell(Tested(test, frame, value))
    verdict = truth(value)
    configured = verdict is None and not value.all_tags() & ~Tag.LASTING
    place = _class_of(machine, frame)
    needs = place if machine.phase == "step" else ""
    if verdict is not False:
        yield body, ((guard(test, True, place, needs),) if configured else ())
    if verdict is not True:
        chained = isinstance(orelse, list) and len(orelse) == 1 and isinstance(orelse[0], ast.If)
        opposite = configured and not chained
        yield orelse, ((guard(test, False, place, needs),) if opposite else ())


def _class_of(machine: Machine, frame: Frame) -> str:
    """Return the full name of the class whose object runs."""

    thing = frame.receiver.only() if frame.receiver else None
    return full_name(machine.record(thing).cls) if isinstance(thing, Instance) else ""
