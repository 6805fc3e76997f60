"""What two runs may differ by: from the exactness class, the dtype and the backend, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_audit.caches import host_float, host_int


@dataclass(frozen=True)
class Allowed:
    """What one exactness class allows.

    Attributes:
        meaning: What compiled decoding does differently from eager decoding.
        relative: By dtype, the largest difference, relative to the largest logit; 0 means bit-equal values.
        multiple: Of eager decoding's own error against float64, how much the error of compiled decoding may be; a
            tenth of the float32 bound comes on top, where eager decoding happens to be exact.
    """

    meaning: str
    relative: Mapping[str, float]
    multiple: float


POLICY: Mapping[str, Allowed] = {
    "exact": Allowed("the same sums in the same order", {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}, 1),
    "reordered": Allowed(
        "the same terms, summed in another order", {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}, 3
    ),
    "kernel": Allowed(
        "another kernel for the same thing", {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}, 10
    ),
}
"""By exactness class."""

BINDING: Mapping[str, str | None] = {"cpu": None, "metal": "kernel", "cuda": "kernel"}
"""By backend, the class that binds there; None is the declared one. A record made there may show better."""

_FLOOR = 0.1
_SMALLEST = 1e-30
"""What the largest reference value counts as where all are zero."""


@dataclass(frozen=True)
class Tolerance:
    """A bound on the largest difference, relative to the largest reference value; 0 means bit-equal values."""

    relative: float
    name: str

    def accepts(self, got: mx.array, want: mx.array) -> bool:
        """Return whether there is no objection."""
        return self.objection(got, want) is None

    def allowed(self, want: mx.array) -> float:
        """Return the largest difference from a reference that is accepted."""
        return self.relative * max(largest(want), _SMALLEST)

    def objection(self, got: mx.array, want: mx.array) -> str | None:
        """Return why `got` is not accepted: shape, dtype, then finite, then the most likely token, then the bound.

        Args:
            got: Logits `[B, vocabulary]`; or any other array, of which no token is most likely.
            want: The reference.
        """
        if got.shape != want.shape:
            return f"shape {got.shape}, wanted {want.shape}"
        if got.dtype != want.dtype:
            return f"dtype {_named(got.dtype)}, wanted {_named(want.dtype)}"
        difference = largest_difference(got, want)
        if not np.isfinite(difference):
            return _worst(got, want)
        other = self._other_choice(got, want)
        if other is not None:
            return f"{other}; {_worst(got, want)}"
        return _worst(got, want) if difference > self.allowed(want) else None

    def _other_choice(self, got: mx.array, want: mx.array) -> str | None:
        """Return which row prefers another token than the reference, unless that is a tie within the tolerance."""
        if got.ndim != 2 or not got.size:
            return None
        mine, reference = (np.array(array.astype(mx.float32)) for array in (got, want))
        for row, (own, theirs) in enumerate(zip(mine, reference, strict=True)):
            choice, best = int(own.argmax()), int(theirs.argmax())
            if theirs[best] - theirs[choice] > self.allowed(want):
                which = f" of row {row}" if len(mine) > 1 else ""
                return f"the most likely token{which} is {choice}, wanted {best}"
        return None


def tolerance_for(exactness: str, dtype: str, backend: str) -> Tolerance:
    """Return the bound of a variant.

    The declared class binds on the CPU; on other backends it is `kernel` until a record made there shows better.
    """
    name = BINDING.get(backend, "kernel") or exactness
    return Tolerance(POLICY[name].relative[dtype], name)


def error_allowed(exactness: str, eager_error: float) -> float:
    """Return the largest error against float64, relative to the largest logit, that compiled float32 may have.

    Args:
        exactness: The class that binds.
        eager_error: That of eager float32 on the same tokens.
    """
    policy = POLICY[exactness]
    return policy.multiple * eager_error + _FLOOR * policy.relative["float32"]


def table() -> str:
    """Return the policy as a Markdown table, as the documents show it."""
    lines = [
        "| class | compiled decoding computes | float32 | bfloat16 | float16 | error against float64 |",
        "|---|---|---|---|---|---|",
    ]
    for name, policy in POLICY.items():
        bounds = [f"{policy.relative[dtype]:g}" for dtype in ("float32", "bfloat16", "float16")]
        floor = _FLOOR * policy.relative["float32"]
        error = f"{policy.multiple:g} × eager's" + (f" + {floor:g}" if floor else "")
        lines.append(f"| `{name}` | {policy.meaning} | {' | '.join(bounds)} | {error} |")
    bound = [f"`{backend}`: {f'`{name}`' if name else 'as declared'}" for backend, name in BINDING.items()]
    return "\n".join(lines) + f"\n\nThe class that binds, by backend: {'; '.join(bound)}.\n"


def largest_difference(got: mx.array, want: mx.array) -> float:
    """Return the largest absolute difference; infinity where shapes differ, or one is not a number.

    Minus infinity in both is no difference: it marks an id that is never to be chosen. Some id must be left.
    """
    if got.shape != want.shape or (got.size and host_float(mx.max(want)) == -np.inf):
        return float("inf")
    difference = host_float(mx.max(_gap(got, want))) if got.size else 0.0
    return difference if np.isfinite(difference) else float("inf")


def relative_difference(got: mx.array, want: mx.array) -> float:
    """Return the smallest relative bound that accepts `got`."""
    return largest_difference(got, want) / max(largest(want), _SMALLEST)


def largest(array: mx.array) -> float:
    """Return the largest absolute value, minus infinity aside."""
    if not array.size:
        return 0.0
    sizes = mx.abs(array.astype(mx.float32))
    return host_float(mx.max(mx.where(array == -mx.inf, 0, sizes)))


def _gap(got: mx.array, want: mx.array) -> mx.array:
    gap = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
    return mx.where((got == -mx.inf) & (want == -mx.inf), 0, gap)


def _named(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _worst(got: mx.array, want: mx.array) -> str:
    difference = _gap(got, want)
    index = host_int(mx.argmax(mx.where(mx.isnan(difference), mx.inf, difference)))
    flat_got, flat_want = mx.reshape(got, (-1,)), mx.reshape(want, (-1,))
    return f"logits[{index}] is {host_float(flat_got[index]):.6g}, wanted {host_float(flat_want[index]):.6g}"
