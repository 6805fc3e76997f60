"""`mx.compile` with a count of its traces, and the name of the argument that forced each new one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class _Count:
    """Traces so far; kept apart from `CountedCompile` so that no cycle keeps a model alive."""

    def __init__(self) -> None:
        self.traces = 0


class CountedCompile:
    """A compiled function that knows how often it was traced, and why.

    MLX keys a trace by the shapes and dtypes of arrays and by the *values* of Python scalars, never evicts one, and
    runs the Python body at every call where compilation is switched off or no C++ compiler is found. Neither shows
    from outside.

    Args:
        function: Called with arrays and lists, tuples or dicts of arrays; a Python scalar is allowed, and costs one
            trace for each value.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        count = _Count()

        def traced(*arguments: Any) -> Any:
            result = function(*arguments)
            count.traces += 1
            return result

        self._count = count
        self._names = list(inspect.signature(function).parameters)
        self._compiled = mx.compile(traced)
        self._last: dict[str, str] = {}
        self.reasons: list[str] = []

    @property
    def trace_count(self) -> int:
        """Successful traces since this object was made."""
        return self._count.traces

    def __call__(self, *arguments: Any) -> Any:
        before = self._count.traces
        result = self._compiled(*arguments)
        if self._count.traces != before:
            self._note(arguments)
        return result

    def _note(self, arguments: tuple[Any, ...]) -> None:
        signature: dict[str, str] = {}
        for name, value in zip(self._names, arguments, strict=False):
            _describe(name, value, signature)
        if self._last:
            changed = [
                f"{name}: {self._last.get(name, 'absent')} → {signature.get(name, 'absent')}"
                for name in sorted(self._last.keys() | signature.keys())
                if self._last.get(name) != signature.get(name)
            ]
            self.reasons.append(
                "retraced because of " + ", ".join(changed[:4])
                if changed
                else "retraced with equal arguments: mx.compile is switched off, or no C++ compiler was found"
            )
        self._last = signature


def _describe(path: str, value: Any, into: dict[str, str]) -> None:
    """Write what MLX's compile key holds of `value`: shape and dtype of arrays, the value of anything else."""
    if isinstance(value, mx.array):
        into[path] = f"{str(value.dtype).removeprefix('mlx.core.')}{list(value.shape)}"
    elif isinstance(value, dict):
        for key, item in value.items():
            _describe(f"{path}[{key!r}]", item, into)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _describe(f"{path}[{index}]", item, into)
    else:
        into[path] = f"{type(value).__name__} {value!r}"
