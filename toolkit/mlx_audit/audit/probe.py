"""Does `mx.compile` compile here? `python -m mlx_audit.audit.probe` answers in a process of its own, as JSON.

The kernel cache that MLX keeps in the temporary directory would hide a missing compiler, so the caller gives the
process an empty one.
"""

from __future__ import annotations

import json
import time

CALLS = 8


def probe() -> dict[str, object]:
    """Compile one fusable function, call it, and count how often its Python body runs."""
    import mlx.core as mx

    traces = 0

    def body(array: mx.array) -> mx.array:
        nonlocal traces
        traces += 1
        return mx.exp(array) * 2 + 1

    # MLX makes its default stream at the first evaluation, and a trace from before that does not count afterwards.
    mx.eval(mx.array(1) + 1)
    compiled = mx.compile(body)
    started = time.perf_counter()
    results = []
    for value in range(CALLS):
        result = compiled(mx.array([float(value)]))
        mx.eval(result)
        results.append(result.item())
    eager = [(mx.exp(mx.array([float(value)])) * 2 + 1).item() for value in range(CALLS)]
    return {
        "device": str(mx.default_device()),
        "metal": mx.metal.is_available(),
        "calls": CALLS,
        "traces": traces,
        "agrees": all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(results, eager, strict=True)),
        "seconds": round(time.perf_counter() - started, 3),
    }


if __name__ == "__main__":
    print(json.dumps(probe()))  # noqa: T201 - the answer
