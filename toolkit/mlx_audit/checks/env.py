"""Did compilation happen at all? Without that every other figure is worth nothing."""

from __future__ import annotations

import mlx.core as mx

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.runs import session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.evidence.environment import backend, compiler
from mlx_audit.tracing.tracer import compile_switched_off

_CALLS = 4


class CompilationHappened(Check):
    """Compilation really happened: one trace, many calls, in this very run.

    What it does:
        Compiles and evaluates a small fused function four times and counts how often its Python body runs, then does
        the same with the subject's own decode step.

    Why:
        `mx.compile` can be off without a word: with `MLX_DISABLE_COMPILE` set to anything, or without a C++ compiler
        on PATH (CPU backend), the "compiled" function runs as plain Python at each call. It is then right, and a
        comparison with eager decoding proves nothing.

    Example:
        MLX_DISABLE_COMPILE=1 mlx-audit run qwen2    # undecided, exit code 4

    How to fix:
        Unset MLX_DISABLE_COMPILE; install a C++ compiler (`g++` on Linux, the Xcode command line tools on macOS);
        `mlx-audit doctor` shows what is missing.

    Sources:
        mlx/compile.cpp (compile_available_for_device); docs/src/usage/compile.rst
    """

    code = "ENV001"
    tier = "numeric"
    requires = ("TRC001",)

    def run(self, subject: Subject) -> Figures:
        probe_traces = _probe()
        if probe_traces != 1:
            raise NotRun(_why(probe_traces))
        if not subject.main:
            return {"probe_traces": probe_traces, "calls": _CALLS}
        session = session_for(subject, _CALLS + 3)
        tokens = teacher_tokens(subject, _CALLS + 3)
        session.prefill([tokens[:3]])
        for token in tokens[3:]:
            session.step([token])
        figures = {"probe_traces": probe_traces, "calls": _CALLS, "traces": session.trace_count}
        if session.trace_count != 1:
            reasons = "; ".join(session.retrace_reasons[:2])
            raise CheckFailed(
                f"the step was traced {session.trace_count} times in {_CALLS} calls, wanted 1: {reasons}",
                figures=figures,
            )
        return figures


def _probe() -> int:
    """Return how often a compiled function's body runs in four evaluated calls."""
    calls = 0

    def body(array: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return mx.exp(array) * 2 + 1

    # MLX makes its default stream at the first evaluation, and the stream is part of the compile key.
    mx.eval(mx.array(1) + 1)
    compiled = mx.compile(body)
    for value in range(_CALLS):
        mx.eval(compiled(mx.array([float(value)])))
    return calls


def _why(traces: int) -> str:
    counted = f"mx.compile ran the Python body {traces} times in {_CALLS} calls"
    if compile_switched_off():
        return f"{counted}: MLX_DISABLE_COMPILE is set (any value counts); unset it and run again"
    if backend() == "cpu" and compiler() is None:
        return f"{counted}: there is no C++ compiler on PATH; install g++ (Linux) or the Xcode tools (macOS)"
    return f"{counted}: compilation is off; `mlx-audit doctor` shows more"
