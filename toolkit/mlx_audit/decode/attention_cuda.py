"""On CUDA, a single token's attention over fixed-capacity caches as one kernel that reads the position on the device.

An array mask makes MLX's CUDA attention fall back to unfused operations over all slots. While a step runs, this
module stands in for `mx.fast.scaled_dot_product_attention`: for one query a row, over keys that a cache has just
handed out and under the mask that a cache has just made, it attends to the slots up to the position and reads no
other. Everything else takes MLX's own function, and so does everything on the CPU and on Metal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityCache, Handed
from mlx_audit.evidence.environment import backend

NAME = "mlx_audit_attention"
"""Part of the kernel's name, by which the trace lint knows it."""

_THREADS = 256
_VECTOR = 8
_WIDEST = 256
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_ALONE = 2048
"""Longest rung that one block a head reads alone; longer ones are split over blocks, which takes a second kernel."""

_MOST_SPLITS = 32
_TRACING = threading.RLock()
_thread = threading.local()
_fast: Any = mx.fast
_mlx_attention = _fast.scaled_dot_product_attention

_HEADER = """
namespace mlx_audit {
template <typename T>
struct alignas(16) Eight {
  T values[8];
};

template <typename T>
__device__ __forceinline__ Eight<T> load(const T* from, bool wanted, bool aligned) {
  Eight<T> loaded;
  if (wanted && aligned) {
    return *reinterpret_cast<const Eight<T>*>(from);
  }
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    loaded.values[i] = wanted ? from[i] : static_cast<T>(0.0f);
  }
  return loaded;
}
}
"""

# One block serves one query head of one row, or, where SPLIT, every gridDim.y-th tile of its keys. LANES neighbouring
# threads share a key, eight numbers each. Sums are taken in a fixed order, so equal inputs give equal bits.
_ATTEND = """
  constexpr int LANES = D <= 8 ? 1 : D <= 16 ? 2 : D <= 32 ? 4 : D <= 64 ? 8 : D <= 128 ? 16 : 32;
  constexpr int GROUPS = THREADS / LANES;
  constexpr int WARPS = THREADS / 32;
  constexpr int AHEAD = 4;
  constexpr float LOWEST = -3.0e38f;
  constexpr float LOG2E = 1.4426950408889634f;
  __shared__ float warp_sums[WARPS][D];
  __shared__ float warp_best[WARPS];
  __shared__ float warp_total[WARPS];

  const int head = blockIdx.x;
  const int split = blockIdx.y;
  const int row = blockIdx.z;
  const int heads = queries_shape[1];
  const int kv_heads = keys_shape[1];
  const int capacity = keys_shape[2];
  const int count = min(max(position[POSITIONS == 1 ? 0 : row] + 1, 0), capacity);
  const size_t place = static_cast<size_t>(row) * heads + head;
  const int lane = threadIdx.x % LANES;
  const int group = threadIdx.x / LANES;
  const bool live = lane * 8 < D;
  const bool aligned = ((reinterpret_cast<size_t>(keys) | reinterpret_cast<size_t>(values)) & 15) == 0;
  const size_t base =
      (static_cast<size_t>(row) * kv_heads + head / (heads / kv_heads)) * capacity * D + lane * 8;

  if (head == 0 && split == 0 && row == 0) {
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
      next[i] = position[i] + 1;
    }
  }

  float query[8];
  float sums[8];
  float best = LOWEST;
  float total = 0.0f;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    query[i] = live ? static_cast<float>(queries[place * D + lane * 8 + i]) * (SCALE * LOG2E) : 0.0f;
    sums[i] = 0.0f;
  }

  for (int tile = split * GROUPS * AHEAD; tile < count; tile += gridDim.y * GROUPS * AHEAD) {
    mlx_audit::Eight<T> key[AHEAD];
    mlx_audit::Eight<T> value[AHEAD];
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int at = tile + a * GROUPS + group;
      key[a] = mlx_audit::load(keys + base + static_cast<size_t>(at) * D, live && at < count, aligned);
    }
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int at = tile + a * GROUPS + group;
      value[a] = mlx_audit::load(values + base + static_cast<size_t>(at) * D, live && at < count, aligned);
    }
    float score[AHEAD];
    float highest = best;
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      float dot = 0.0f;
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        dot += query[i] * static_cast<float>(key[a].values[i]);
      }
      #pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) {
        dot += __shfl_xor_sync(0xffffffff, dot, offset);
      }
      score[a] = tile + a * GROUPS + group < count ? dot : LOWEST;
      highest = max(highest, score[a]);
    }
    const float factor = exp2f(best - highest);
    best = highest;
    total *= factor;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      sums[i] *= factor;
    }
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const float weight = tile + a * GROUPS + group < count ? exp2f(score[a] - best) : 0.0f;
      total += weight;
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        sums[i] += weight * static_cast<float>(value[a].values[i]);
      }
    }
  }

  #pragma unroll
  for (int offset = LANES; offset < 32; offset *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, best, offset);
    const float highest = max(best, other);
    const float mine = exp2f(best - highest);
    const float theirs = exp2f(other - highest);
    total = total * mine + __shfl_xor_sync(0xffffffff, total, offset) * theirs;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      sums[i] = sums[i] * mine + __shfl_xor_sync(0xffffffff, sums[i], offset) * theirs;
    }
    best = highest;
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 < LANES && live) {
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      warp_sums[warp][lane * 8 + i] = sums[i];
    }
  }
  if (threadIdx.x % 32 == 0) {
    warp_best[warp] = best;
    warp_total[warp] = total;
  }
  __syncthreads();
  float highest = LOWEST;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) {
    highest = max(highest, warp_best[w]);
  }
  float all = 0.0f;
  float sum = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float factor = exp2f(warp_best[w] - highest);
    all += warp_total[w] * factor;
    if (threadIdx.x < D) {
      sum += warp_sums[w][threadIdx.x] * factor;
    }
  }
"""

_WHOLE = """
  if (threadIdx.x < D) {
    out[place * D + threadIdx.x] = static_cast<T>(all > 0.0f ? sum / all : 0.0f);
  }
"""

_PART = """
  const size_t part = place * gridDim.y + split;
  if (threadIdx.x < D) {
    sums_out[part * D + threadIdx.x] = sum;
  }
  if (threadIdx.x == 0) {
    stats_out[part * 2] = highest;
    stats_out[part * 2 + 1] = all;
  }
"""

_COMBINE = """
  const size_t place = blockIdx.x;
  float highest = -3.0e38f;
  for (int s = 0; s < SPLITS; s++) {
    highest = max(highest, stats[(place * SPLITS + s) * 2]);
  }
  float all = 0.0f;
  float sum = 0.0f;
  for (int s = 0; s < SPLITS; s++) {
    const float factor = exp2f(stats[(place * SPLITS + s) * 2] - highest);
    all += stats[(place * SPLITS + s) * 2 + 1] * factor;
    sum += sums[(place * SPLITS + s) * D + threadIdx.x] * factor;
  }
  out[place * D + threadIdx.x] = static_cast<T>(all > 0.0f ? sum / all : 0.0f);
"""


@cache
def available() -> bool:
    """Return whether the kernel can run: MLX computes on CUDA by default."""
    return backend() == "cuda"


@contextmanager
def position_bounded_attention(caches: Sequence[FixedCapacityCache]) -> Iterator[None]:
    """Run single-token attention over `caches` as one kernel, where that is possible; elsewhere, change nothing.

    Only the forward that is traced inside sees the difference: another thread's arrays are not those of `caches`.
    """
    if not available():
        yield
        return
    for entry in caches:
        entry.handed = Handed()

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: Any = None,
        **others: Any,
    ) -> mx.array:
        owner = None if sinks is not None or others else _owner(caches, queries, keys, values, mask)
        if owner is None:
            unfused: mx.array = _mlx_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=sinks, **others
            )
            return unfused
        handed: Any = owner.handed
        rung = 0 if getattr(_thread, "unsplit", False) else keys.shape[2]
        out, following = attend(queries, owner.keys, owner.values, handed.position, float(scale), rung=rung)
        owner.advance_to(following)
        return out

    with _TRACING:
        _fast.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            _fast.scaled_dot_product_attention = _mlx_attention
            for entry in caches:
                entry.handed = None


@contextmanager
def unsplit() -> Iterator[None]:
    """Take one kernel at every rung, as the trace proof does, which asks for the same graph at all sizes."""
    before = getattr(_thread, "unsplit", False)
    _thread.unsplit = True
    try:
        yield
    finally:
        _thread.unsplit = before


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, position: mx.array, scale: float, *, rung: int
) -> tuple[mx.array, mx.array]:
    """Return the attention of one query a row over the slots up to `position`, and the position after it.

    Args:
        queries: `[B, heads, 1, D]`.
        keys, values: Whole buffers `[B, key heads, capacity, D]` that hold the token at `position` already.
        position: int32, `[1]` or `[B]`; what lies outside the buffer is never read.
        scale: Of the scores.
        rung: Slots that may be filled; it decides over how many blocks the keys are split.
    """
    batch, heads, _, width = queries.shape
    splits = 1 if rung <= _ALONE else min(_MOST_SPLITS, rung // 1024)
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {
        "next": (position.shape, position.dtype),
        "out": (queries.shape, queries.dtype),
    }
    if splits > 1:
        outputs = {
            "next": outputs["next"],
            "sums_out": ((batch, heads, splits, width), mx.float32),
            "stats_out": ((batch, heads, splits, 2), mx.float32),
        }
    following, *results = _kernel(tuple(outputs), scale)(
        inputs=[queries, keys, values, position],
        template=[
            ("T", queries.dtype),
            ("D", width),
            ("THREADS", _THREADS),
            ("POSITIONS", position.size),
        ],
        grid=(heads * _THREADS, splits, batch),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    if splits == 1:
        return results[0], following
    (out,) = _combiner()(
        inputs=results,
        template=[("T", queries.dtype), ("D", width), ("SPLITS", splits)],
        grid=(batch * heads * width, 1, 1),
        threadgroup=(width, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out, following


def _owner(
    caches: Sequence[FixedCapacityCache], queries: mx.array, keys: mx.array, values: mx.array, mask: Any
) -> Any:
    """Return the cache that handed out exactly these arrays for a single token, under a causal mask of the caches."""
    if not any(entry.handed is not None and entry.handed.mask is mask for entry in caches) or mask is None:
        return None
    for entry in caches:
        handed = entry.handed
        if handed is not None and handed.keys is keys and handed.values is values:
            return entry if _fits(queries, keys, values) else None
    return None


def _fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    width = queries.shape[-1]
    return (
        queries.ndim == 4
        and queries.shape[2] == 1
        and queries.shape[0] == keys.shape[0]
        and queries.shape[1] % keys.shape[1] == 0
        and keys.shape[3] == values.shape[3] == width
        and width % _VECTOR == 0
        and width <= _WIDEST
        and queries.dtype == keys.dtype == values.dtype
        and queries.dtype in _DTYPES
    )


@cache
def _kernel(outputs: tuple[str, ...], scale: float) -> Any:
    return mx.fast.cuda_kernel(
        name=f"{NAME}_{'part' if len(outputs) > 2 else 'whole'}",
        input_names=["queries", "keys", "values", "position"],
        output_names=list(outputs),
        source=_packed(
            f"constexpr float SCALE = {scale!r};\n{_ATTEND}{_PART if len(outputs) > 2 else _WHOLE}"
        ),
        header=_packed(_HEADER),
    )


@cache
def _combiner() -> Any:
    return mx.fast.cuda_kernel(
        name=f"{NAME}_combine", input_names=["sums", "stats"], output_names=["out"], source=_COMBINE
    )


def _packed(source: str) -> str:
    """Return the source without indentation: MLX hashes all of it at every call."""
    return "".join(f"{line.strip()}\n" for line in source.splitlines())
