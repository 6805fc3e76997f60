"""The interpreter: the machine, with all that runs on it."""

from __future__ import annotations

import ast

from mlx_audit.source import assignments, attributes, calls, expressions, operators, rules, statements
from mlx_audit.source.arguments import Arguments
from mlx_audit.source.machine import Frame, Machine
from mlx_audit.source.values import Value

REGISTERING = (expressions, operators, statements, rules)
"""Modules that register what they hold when they are imported."""


class Interpreter(Machine):
    """Runs a model's source over abstract values."""

    def call(self, target: Value, arguments: Arguments, node: ast.expr, frame: Frame) -> Value:
        return calls.call(self, target, arguments, node, frame)

    def attribute(self, value: Value, name: str, node: ast.expr, frame: Frame) -> Value:
        return attributes.attribute(self, value, name, node, frame)

    def assign(self, target: ast.expr, value: Value, frame: Frame, changed: bool = False) -> None:
        assignments.assign(self, target, value, frame, changed)
