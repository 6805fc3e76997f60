"""MLX's primitives by what they do in a decode step."""

from __future__ import annotations

from mlx_audit.decode import attention_cuda
from mlx_audit.tracing.graph import Node

WRITES = frozenset(("DynamicSliceUpdate", "Scatter", "ScatterAxis"))
PRODUCTS = frozenset(
    ("Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM", "BlockMaskedMM", "SegmentedMM")
)
EXPERTS = frozenset(("GatherMM", "GatherQMM"))
"""Products with some of many matrices, chosen by index."""

LOOKUPS = frozenset(("Gather", "GatherAxis"))

JUDGES = frozenset(("Softmax", "ArgPartition"))
"""What turns scores into weights, or into a choice of keys."""

COMPARISONS = frozenset(("GreaterEqual", "Greater", "LessEqual", "Less", "Equal", "NotEqual"))
FUSED = "ScaledDotProductAttention"
SHAPES = frozenset(
    (
        "Broadcast",
        "ExpandDims",
        "Squeeze",
        "Reshape",
        "Flatten",
        "Unflatten",
        "Transpose",
        "AsType",
        "Copy",
        "View",
    )
)


def is_own_kernel(node: Node) -> bool:
    """Return whether a node is the attention kernel for CUDA, which needs no mask."""
    return node.primitive == "CustomKernel" and attention_cuda.NAME in str(node.arguments[0])
