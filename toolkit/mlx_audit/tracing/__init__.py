"""The traced step as data: compare, lint, cost."""

from mlx_audit.tracing import lint
from mlx_audit.tracing.graph import Graph, Leaf, Node, Value
from mlx_audit.tracing.proof import HISTORIES, TraceProof, prove
from mlx_audit.tracing.tracer import (
    PRIME_CAPACITY,
    ExportRefused,
    StepTracer,
    TraceFailed,
    compile_is_on,
    source_line,
)

__all__ = [
    "HISTORIES",
    "PRIME_CAPACITY",
    "ExportRefused",
    "Graph",
    "Leaf",
    "Node",
    "StepTracer",
    "TraceFailed",
    "TraceProof",
    "Value",
    "compile_is_on",
    "lint",
    "prove",
    "source_line",
]
