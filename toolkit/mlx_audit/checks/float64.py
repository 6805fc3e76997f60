"""Operations in real float64: on the CPU, MLX computes many of them in float32, or as exactly as float32 needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx

from mlx_audit.caches import host_int
from mlx_audit.checks.stand_ins import gather_and_matmul, swapped

IMPRECISE = frozenset(
    {
        *(
            "Convolution",
            "Cos",
            "Cosh",
            "Erf",
            "ErfInv",
            "Exp",
            "Expm1",
            "GatherMM",
            "LogAddExp",
            "LogSumExp",
        ),
        *("Sigmoid", "Sin", "Sinh", "Softmax", "Tan"),
    }
)
"""Primitives whose float64 result is no better than a float32 one, or was not looked at."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Make a model's own forward compute in float64, on the CPU: `mx.float32` in its code means float64."""
    own = (_exp, _sigmoid, _softmax, _logsumexp, _logaddexp, _conv1d)
    fast = (_rms_norm, _layer_norm, _rope, _scaled_dot_product_attention)
    with ExitStack() as stack:
        stack.enter_context(mx.stream(mx.cpu))
        # Otherwise MLX would build a kernel for each fused piece, which takes longer than to run it.
        mx.disable_compile()
        stack.callback(mx.enable_compile)
        swaps: list[tuple[Any, str, Any]] = [(mx, function.__name__[1:], function) for function in own]
        swaps += [(mx.fast, function.__name__[1:], function) for function in fast]
        swaps += [(mx, "gather_mm", gather_and_matmul), (mx, "float32", mx.float64)]
        stack.enter_context(swapped(*swaps))
        yield


def _exp(x: mx.array, **_: Any) -> mx.array:
    return mx.power(mx.array(math.e, mx.float64), x)


def _sigmoid(x: mx.array, **_: Any) -> mx.array:
    return 0.5 * (1 + mx.tanh(0.5 * x))


def _softmax(x: mx.array, axis: Any = None, **_: Any) -> mx.array:
    weights = _exp(x - mx.max(x, axis=axis, keepdims=True))
    return weights / mx.sum(weights, axis=axis, keepdims=True)


def _logsumexp(x: mx.array, axis: Any = None, keepdims: bool = False, **_: Any) -> mx.array:
    top = mx.max(x, axis=axis, keepdims=True)
    total = mx.log(mx.sum(_exp(x - top), axis=axis, keepdims=True)) + top
    return total if keepdims else mx.squeeze(total, axis)


def _logaddexp(a: Any, b: Any, **_: Any) -> mx.array:
    return mx.maximum(a, b) + mx.log1p(_exp(-mx.abs(mx.subtract(a, b))))


def _conv1d(
    x: mx.array,
    weight: mx.array,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    **_: Any,
) -> mx.array:
    """Convolve `[B, L, C]` with `[O, K, C / groups]`, as decoders do: without stride, padding or dilation."""
    if (stride, padding, dilation) != (1, 0, 1):
        raise ValueError(f"conv1d with stride {stride}, padding {padding}, dilation {dilation}")
    outputs, width, channels = weight.shape
    length = x.shape[1] - width + 1
    inputs = mx.reshape(x, (*x.shape[:2], groups, 1, channels))
    kernels = mx.reshape(weight, (groups, outputs // groups, width, channels))
    terms = [mx.sum(inputs[:, k : k + length] * kernels[:, :, k], axis=-1) for k in range(width)]
    return mx.reshape(sum(terms[1:], terms[0]), (x.shape[0], length, outputs))


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
    normed = x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **_: Any
) -> mx.array:
    centred = x - mx.mean(x, axis=-1, keepdims=True)
    normed = _rms_norm(centred, weight, eps)
    return normed if bias is None else normed + bias


def _rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: Any,
    freqs: mx.array | None = None,
    **_: Any,
) -> mx.array:
    """Rotate `[…, L, D]` by angles computed in Python's floats; the offset is a host integer in eager decoding."""
    half = dims // 2
    periods: Any = [float(base or 1) ** (i / half) for i in range(half)] if freqs is None else freqs.tolist()
    start = host_int(offset) if isinstance(offset, mx.array) else int(offset)
    angles = [[(start + t) * scale / period for period in periods] for t in range(x.shape[-2])]
    cos = mx.array([[math.cos(angle) for angle in row] for row in angles], mx.float64)
    sin = mx.array([[math.sin(angle) for angle in row] for row in angles], mx.float64)
    if traditional:
        first, second = x[..., 0:dims:2], x[..., 1:dims:2]
    else:
        first, second = x[..., :half], x[..., half:dims]
    turned = [first * cos - second * sin, first * sin + second * cos]
    if traditional:
        rotated = mx.reshape(mx.stack(turned, axis=-1), (*x.shape[:-1], dims))
    else:
        rotated = mx.concatenate(turned, axis=-1)
    return mx.concatenate([rotated, x[..., dims:]], axis=-1)


def _scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **_: Any,
) -> mx.array:
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = (q * scale) @ mx.swapaxes(k, -1, -2)
    if isinstance(mask, str):
        queries = mx.arange(q.shape[2]) + (k.shape[2] - q.shape[2])
        mask = mx.expand_dims(queries, 1) >= mx.arange(k.shape[2])
    if mask is not None:
        scores = mx.where(mask, scores, -math.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        extra = mx.broadcast_to(mx.reshape(sinks, (1, -1, 1, 1)), (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, extra], axis=-1)
    return _softmax(scores, axis=-1)[..., : v.shape[2]] @ v
