"""LIF004: a model that nobody refers to any more is gone, with all that was made for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from audited import green, healthy, new_subject, red
from kind_models import KINDS, kind_subject
from mlx_audit.adapters import snapshots_reused
from mlx_audit.caches import FixedCapacityCache
from mlx_audit.decode import CompiledDecodeSession, DecodeStep
from mlx_audit.faults import FAULTS
from tiny_models import FAMILIES

Patch = pytest.MonkeyPatch
_kept: list[Any] = []


@pytest.fixture(autouse=True)
def _let_go() -> Any:
    yield
    _kept.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy(family: str) -> None:
    assert green("LIF004", healthy(family)).figures["growth_bytes"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_with_every_kind_of_cache(kind: str) -> None:
    assert green("LIF004", kind_subject(kind)).figures["watched"] > 30


def test_what_an_audit_keeps_for_itself_is_no_leak() -> None:
    with snapshots_reused():
        green("LIF004", healthy())
        green("LIF002", healthy())
        green("LIF004", healthy())


def _keep_a_session_by_its_method(patch: Patch) -> None:
    """A callback that is never taken off the list, and a cycle through the session that it belongs to."""
    own = CompiledDecodeSession.prefill

    def prefill(self: CompiledDecodeSession, tokens: Any, lengths: Any = None) -> mx.array:
        self._me = self  # type: ignore[attr-defined]
        _kept.append(self.trim)
        return own(self, tokens, lengths)

    patch.setattr(CompiledDecodeSession, "prefill", prefill)


def _keep_compiled_functions(patch: Patch) -> None:
    """A compile cache for the whole process, by rung."""
    patch.setattr(
        CompiledDecodeSession, "_compiled", functools.lru_cache(maxsize=4)(CompiledDecodeSession._compiled)
    )


def _keep_caches(patch: Patch) -> None:
    """A compiled function that closes over the caches that it was made for, without the model."""
    own = DecodeStep.at_rung

    def at_rung(self: DecodeStep, rung: int) -> DecodeStep:
        step = own(self, rung)
        _kept.append(step.caches)
        return step

    patch.setattr(DecodeStep, "at_rung", at_rung)


def _keep_exceptions(patch: Patch) -> None:
    """The last errors are kept for a log, and with them the frames that they came through."""
    own = CompiledDecodeSession.extend

    def extend(self: CompiledDecodeSession, tokens: Any) -> mx.array:
        try:
            return own(self, tokens)
        except Exception as error:
            _kept.append(error)
            raise

    patch.setattr(CompiledDecodeSession, "extend", extend)


def _keep_arrays(patch: Patch) -> None:
    """Keys of adopted caches are kept: no object but arrays."""
    own = FixedCapacityCache.refilled

    def refilled(self: FixedCapacityCache, native: Any) -> FixedCapacityCache:
        cache = own(self, native)
        _kept.extend(cache.state)
        return cache

    patch.setattr(FixedCapacityCache, "refilled", refilled)


RED: dict[Callable[[Patch], None], str] = {
    _keep_a_session_by_its_method: "went: CompiledDecodeSession, Model,",
    _keep_compiled_functions: "went: 2 CompiledDecodeSession, Model,",
    _keep_caches: "went: 4 FixedCapacityKVCache",
    _keep_exceptions: "went: 2 CompiledDecodeSession, Model,",
    _keep_arrays: "bytes are still in use",
    FAULTS["models_kept"].plant: "went: Model, LlamaModel,",
    FAULTS["caches_kept"].plant: "FixedCapacityKVCache",
    FAULTS["sessions_kept"].plant: "CompiledDecodeSession, Model,",
}


@pytest.mark.parametrize("plant", RED, ids=lambda plant: plant.__name__.strip("_"))
def test_red(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    subject = new_subject()
    subject.vocabulary  # noqa: B018  the shared model is there before
    plant(monkeypatch)
    assert RED[plant] in red("LIF004", subject).reason


def test_a_table_that_the_first_use_leaves_is_no_leak(monkeypatch: Patch) -> None:
    own = CompiledDecodeSession.prefill

    def prefill(self: CompiledDecodeSession, tokens: Any, lengths: Any = None) -> mx.array:
        if not _kept:
            _kept.append(mx.arange(1000) + 1)
            mx.eval(_kept)
        return own(self, tokens, lengths)

    monkeypatch.setattr(CompiledDecodeSession, "prefill", prefill)
    green("LIF004", new_subject())
