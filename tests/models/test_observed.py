"""Which layer is given which cache, seen by running a forward that computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_audit.models.observed import observe

HUGE = 1 << 20
"""Rows and columns of a matrix that no machine could hold."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.zeros((HUGE, HUGE))

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        return x @ self.weight


class Model(nn.Module):
    """Three layers; which of the entries each is given is up to the test."""

    def __init__(self, entries: int, given: Callable[[int], int | None], *, reads: bool = False) -> None:
        super().__init__()
        self.layers = [Layer() for _ in range(3)]
        self._entries, self._given, self._reads = entries, given, reads

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in range(self._entries)]

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        x = mx.zeros((1, HUGE))
        for at, layer in enumerate(self.layers):
            number = self._given(at)
            x = layer(x, cache=None if number is None else cache[number])
            if self._reads and x.sum().item() > 0:
                break
        return x


def kinds(model: Model) -> list[str] | None:
    shown = observe(model)
    return None if shown.layers is None else [spec.kind for spec in shown.layers]


def test_a_layer_that_is_given_no_cache_has_none() -> None:
    assert kinds(Model(2, {0: 0, 1: None, 2: 1}.get)) == ["linear", "none", "linear"]


def test_a_layer_that_shares_an_earlier_one_has_none_of_its_own() -> None:
    assert kinds(Model(2, {0: 0, 1: 1, 2: 1}.get)) == ["linear", "linear", "none"]


def test_an_entry_that_no_layer_is_given_comes_before_them() -> None:
    shown = observe(Model(4, lambda at: at + 1))
    assert ([spec.kind for spec in shown.before], shown.count) == (["linear"], 3)


def test_where_layers_do_not_take_one_each_the_entries_count() -> None:
    shown = observe(Model(6, lambda at: 2 * at))
    assert (shown.before, shown.count, kinds(Model(6, lambda at: 2 * at))) == ([], 6, ["linear"] * 6)


def test_a_forward_that_reads_a_value_is_stopped_before_it_computes() -> None:
    read = mx.array.item
    assert kinds(Model(2, {0: 0, 1: None, 2: 1}.get, reads=True)) is None
    assert mx.array.item is read
