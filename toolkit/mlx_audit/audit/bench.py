"""Compiled against eager decoding: the same tokens in short alternating blocks of one run, so that noise hits both.

Eager is the loop of mlx-lm's `generate_step` on the model's own caches, compiled the loop of a session's `generate`:
both dispatch the next step before they read the last token. Ratios are eager over compiled time: above 1, compiled is
faster. Beside the time that passes, the time that the process spent on the processors is compared: other work on the
machine changes it little, but it counts what the host does while the device is busy as if that cost time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from mlx_audit.audit.ratios import geometric_mean
from mlx_audit.caches import host_int
from mlx_audit.decode import CompiledDecodeSession, run
from mlx_audit.decode.ladder import rung_for
from mlx_audit.errors import MlxAuditError

PROMPT = 24
"""Tokens of the prompt of the whole generation."""

_MEMORY_FILL, _MEMORY_STEPS = 64, 8


@dataclass(frozen=True)
class Sizes:
    """What to measure.

    Attributes:
        fills: Tokens in the caches when a block begins.
        capacities: Of the session.
        blocks: Pairs of blocks at each fill and capacity.
        tokens: Tokens a block.
        generate: Length, prompt included, of one whole generation with its traces; 0 leaves it out.
        seed: Of tokens and cache contents.
    """

    fills: Sequence[int] = (64, 260, 1000, 1030)
    capacities: Sequence[int] = (1024, 8192)
    blocks: int = 24
    tokens: int = 4
    generate: int = 0
    seed: int = 0


@dataclass
class Cell:
    """One fill at one capacity.

    Attributes:
        ratios: Eager time over compiled time, a pair of blocks each.
        cpu_ratios: The same of processor time, all threads.
        eager_ms, compiled_ms: Medians, a token.
        trace_seconds: The first compiled step, which is no part of the ratios.
        same_tokens: Whether both loops chose the same tokens.
    """

    capacity: int
    fill: int
    rung: int
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    eager_ms: float = 0.0
    compiled_ms: float = 0.0
    trace_seconds: float = 0.0
    traces: int = 0
    same_tokens: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, with the geometric means and their intervals."""
        means = {
            "ratio": geometric_mean([self.ratios]).to_dict(),
            "cpu_ratio": geometric_mean([self.cpu_ratios]).to_dict(),
        }
        return {**asdict(self), **means}


def measure(model: nn.Module, sizes: Sizes, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the measurements of a model as plain data."""
    vocabulary = int(model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model)).shape[-1])
    pairs = [(capacity, fill) for capacity in sizes.capacities for fill in sizes.fills]
    cells, skipped = [], []
    for capacity, fill in pairs:
        if fill + sizes.tokens > capacity:
            skipped.append(f"{fill} of {capacity}: no room for a block of {sizes.tokens} tokens")
            continue
        cells.append(_cell(model, vocabulary, capacity, fill, sizes))
        progress(f"capacity {capacity}, fill {fill}")
    if not cells:
        raise MlxAuditError(
            "nothing can be measured", found="; ".join(skipped), fix="give a larger --capacity"
        )
    result: dict[str, Any] = {
        "cells": [cell.to_dict() for cell in cells],
        "geometric_mean": geometric_mean([cell.ratios for cell in cells]).to_dict(),
        "cpu_geometric_mean": geometric_mean([cell.cpu_ratios for cell in cells]).to_dict(),
        "skipped": skipped,
        "memory": [_memory(model, vocabulary, capacity, sizes) for capacity in sizes.capacities],
    }
    if sizes.generate:
        progress(f"a generation of {sizes.generate} tokens")
        result["generation"] = _generation(model, vocabulary, sizes)
    return result


class Bench(CompiledDecodeSession):
    """A session that begins with caches filled elsewhere, where a real prefill would take minutes, and with a token."""

    def adopt(self, native: Sequence[Any], position: int) -> None:
        """Take copies of the model's own caches over."""
        pairs = zip(self._step.caches, native, strict=True)
        self._state = [cache.refilled(own).state for cache, own in pairs]
        mx.eval(self._state)
        self._position = position

    def after(self, token: int, count: int) -> list[int]:
        """Return the `count` greedy tokens after `token`, by the loop of `generate`."""
        loop = self._follow(mx.array([token], mx.int32), count + 1, None, frozenset())
        return list(loop)[1:]


def _filled(model: nn.Module, fill: int, vocabulary: int, seed: int) -> list[Any]:
    """Return the model's own caches with `fill` tokens: random keys and values, where the caches are plain."""
    native: list[Any] = make_prompt_cache(model)
    ids = np.random.default_rng(seed).integers(0, vocabulary, (1, fill)).astype(np.int32)
    plain = all(type(cache) is KVCache for cache in native)
    mx.eval(run(model, mx.array(ids[:, : 1 if plain else fill]), native))
    if plain and fill > 1:
        for cache in native:
            shapes = [(*a.shape[:2], fill - 1, a.shape[3]) for a in (cache.keys, cache.values)]
            parts = [mx.random.normal(shape).astype(cache.keys.dtype) for shape in shapes]
            mx.eval(cache.update_and_fetch(*parts))
    return native


def _cell(model: nn.Module, vocabulary: int, capacity: int, fill: int, sizes: Sizes) -> Cell:
    mx.random.seed(sizes.seed)
    native = _filled(model, fill, vocabulary, sizes.seed)
    if not can_trim_prompt_cache(native):
        raise _cannot_rewind(native, fill)
    session = Bench(model, capacity, evidence="ignore")
    session.adopt(native, fill)
    cell = Cell(capacity, fill, rung_for(fill + 1, capacity))
    started = time.perf_counter()
    session.step([0])
    cell.trace_seconds = round(time.perf_counter() - started, 4)
    session.trim(1)
    starts = np.random.default_rng([sizes.seed, fill]).integers(0, vocabulary, sizes.blocks + 1)
    pairs: list[tuple[_Timed, _Timed]] = []
    for index, token in enumerate(int(start) for start in starts):
        pairs.append(_in_turns(model, native, session, token, sizes.tokens, index))
        # A ring may have turned in this very block; then neither side can go back.
        if session.trim(sizes.tokens) != sizes.tokens or not can_trim_prompt_cache(native):
            raise _cannot_rewind(native, fill)
        trim_prompt_cache(native, sizes.tokens)
    _note(cell, pairs, sizes.tokens)
    cell.traces = session.trace_count
    return cell


def _cannot_rewind(native: Sequence[Any], fill: int) -> MlxAuditError:
    return MlxAuditError(
        "caches that cannot take tokens back cannot be measured in repeated blocks",
        where=f"bench, filled {fill}",
        found=", ".join(sorted({type(cache).__name__ for cache in native})),
        allowed="caches that can be trimmed: KVCache, or a ring that has not turned",
        fix="measure a family with full attention, or fill less than the window",
    )


class _Timed(NamedTuple):
    """Seconds that passed, seconds on the processors, and the tokens chosen."""

    wall: float
    cpu: float
    tokens: list[int]


def _note(cell: Cell, pairs: Sequence[tuple[_Timed, _Timed]], tokens: int) -> None:
    """Put the results of pairs of blocks, eager and compiled, into a cell; the first pair has only warmed up."""
    cell.same_tokens = all(eager.tokens == compiled.tokens for eager, compiled in pairs)
    counted = pairs[1:]
    cell.ratios = [round(eager.wall / compiled.wall, 4) for eager, compiled in counted]
    cell.cpu_ratios = [round(eager.cpu / compiled.cpu, 4) for eager, compiled in counted]
    cell.eager_ms, cell.compiled_ms = (
        round(1000 * float(np.median([timed.wall for timed in way])) / tokens, 3)
        for way in zip(*counted, strict=True)
    )


def _in_turns(
    model: nn.Module, native: list[Any], session: Bench, token: int, count: int, turn: int
) -> tuple[_Timed, _Timed]:
    """Time one block each, eager and compiled; by turns the one or the other is first."""
    if turn % 2:
        compiled = _timed(lambda: session.after(token, count))
        return _timed(lambda: eager_tokens(model, native, token, count)), compiled
    eager = _timed(lambda: eager_tokens(model, native, token, count))
    return eager, _timed(lambda: session.after(token, count))


def eager_tokens(model: nn.Module, native: list[Any], token: int, count: int) -> list[int]:
    """Return the greedy tokens after `token`, as mlx-lm's `generate_step` makes them."""

    def step(ids: mx.array) -> mx.array:
        logits = run(model, ids[None], native)
        sampled = mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
        mx.async_eval(sampled)
        return sampled

    found = []
    sampled = step(mx.array([token], mx.int32))
    for index in range(count):
        following = step(sampled) if index + 1 < count else sampled
        found.append(host_int(sampled))
        sampled = following
    return found


def _timed(work: Callable[[], list[int]]) -> _Timed:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return _Timed(time.perf_counter() - wall, time.process_time() - cpu, tokens)


def _generation(model: nn.Module, vocabulary: int, sizes: Sizes) -> dict[str, Any]:
    """Time one whole generation, prefill and traces included, both ways in alternating pieces."""
    prompt = np.random.default_rng(sizes.seed).integers(0, vocabulary, PROMPT).tolist()
    native: list[Any] = make_prompt_cache(model)
    session = Bench(model, sizes.generate, evidence="ignore")
    first = _timed(lambda: [_best(run(model, mx.array([prompt], mx.int32), native))])
    pairs = [(first, _timed(lambda: [_best(session.prefill([prompt]))]))]
    for turn, count in enumerate(_pieces(sizes.generate - PROMPT)):
        last = pairs[-1][0].tokens[-1]
        pairs.append(_in_turns(model, native, session, last, count, turn))
    eager, compiled = (sum(timed.wall for timed in way) for way in zip(*pairs, strict=True))
    return {
        "tokens": sizes.generate,
        "ratio": round(eager / compiled, 4),
        "eager_seconds": round(eager, 3),
        "compiled_seconds": round(compiled, 3),
        "traces": session.trace_count,
        "same_tokens": all(eager.tokens == compiled.tokens for eager, compiled in pairs),
    }


def _pieces(total: int, size: int = 16) -> Iterator[int]:
    while total > 0:
        yield min(size, total)
        total -= size


def _best(logits: mx.array) -> int:
    return host_int(mx.argmax(logits, axis=-1))


def _memory(model: nn.Module, vocabulary: int, capacity: int, sizes: Sizes) -> dict[str, int]:
    """Return the peaks of both ways from prefill to some steps, each measured while the other holds nothing."""
    fill = min(_MEMORY_FILL, capacity - _MEMORY_STEPS)
    prompt = np.random.default_rng(sizes.seed).integers(0, vocabulary, (1, fill)).tolist()

    def eager() -> int:
        native: list[Any] = make_prompt_cache(model)
        mx.eval(run(model, mx.array(prompt, mx.int32), native))
        eager_tokens(model, native, 0, _MEMORY_STEPS)
        return 0

    def compiled() -> int:
        session = Bench(model, capacity, evidence="ignore")
        session.prefill(prompt)
        session.after(0, _MEMORY_STEPS)
        return sum(array.nbytes for arrays in session.state for array in arrays)

    eager_peak, _ = _peak(eager)
    compiled_peak, buffers = _peak(compiled)
    return {
        "capacity": capacity,
        "fill": fill,
        "buffer_bytes": buffers,
        "eager_peak_bytes": eager_peak,
        "compiled_peak_bytes": compiled_peak,
    }


def _peak(work: Callable[[], int]) -> tuple[int, int]:
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    result = work()
    return mx.get_peak_memory(), result
