"""What a port of a model may do: keep something from call to call, leave the mask out, or hide what it computes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_audit.faults.base import DoesNotApply, Planter, fault

Forward = Callable[..., mx.array]


def _forward(patch: Planter, changed: Callable[[Any, mx.array, Forward], mx.array]) -> None:
    """Replace the model's forward by one that is told the model, the tokens and its own forward."""
    own = patch.module.Model.__call__

    def call(self: Any, inputs: mx.array, *arguments: Any, **options: Any) -> mx.array:
        return changed(self, inputs, lambda: own(self, inputs, *arguments, **options))

    patch.setattr(patch.module.Model, "__call__", call)


@fault("TRC001")
def toggle(patch: Planter) -> None:
    """Every second call of the forward does something else."""
    calls = itertools.count()
    _forward(patch, lambda model, tokens, own: own() * (1.0 + 0.25 * (next(calls) % 2)))


@fault("TRC001")
def constant_of_the_history(patch: Planter) -> None:
    """The forward counts the tokens that it has read, and scales by a Python number made of the count."""
    read = [0]

    def changed(model: Any, tokens: mx.array, own: Forward) -> mx.array:
        read[0] += tokens.shape[1]
        return own() * (1.0 + 0.01 * (read[0] % 7))

    _forward(patch, changed)


@fault("TRC001")
def scalar_of_the_prompt(patch: Planter) -> None:
    """The length of the last prompt is kept on the module as a Python number, and used in decode."""

    def changed(model: Any, tokens: mx.array, own: Forward) -> mx.array:
        if tokens.shape[1] > 1:
            object.__setattr__(model, "prompt_length", tokens.shape[1])
        return own() + 0.1 * getattr(model, "prompt_length", 1)

    _forward(patch, changed)


@fault("TRC001")
def memo_of_the_first_call(patch: Planter) -> None:
    """What the forward computed from its first tokens is kept, and added ever after."""

    def changed(model: Any, tokens: mx.array, own: Forward) -> mx.array:
        logits = own()
        if getattr(model, "memo", None) is None:
            object.__setattr__(model, "memo", logits[:, -1:] * 0.1)
        return logits + model.memo

    _forward(patch, changed)


@fault("TRC001")
def random_numbers_in_the_step(patch: Planter) -> None:
    """The forward draws a random number; in a compiled step the draw is a constant."""
    _forward(patch, lambda model, tokens, own: own() + mx.random.uniform())


@fault("TRC005", needs="slots")
def mask_left_out(patch: Planter) -> None:
    """Attention gets no mask: right in eager decoding, where a cache holds nothing but the past."""
    own = [
        cls for cls in vars(patch.module).values() if getattr(cls, "__module__", "") == patch.module.__name__
    ]
    # A module that only makes other caches runs the forward of the module that it takes its classes from.
    runs = any("__call__" in vars(cls) for cls in own if isinstance(cls, type))
    homes = [
        sys.modules[cls.__module__] for cls in patch.module.Model.__mro__ if cls.__module__ in sys.modules
    ]
    masking = [
        home for home in (homes if not runs else [patch.module]) if hasattr(home, "create_attention_mask")
    ]
    if not masking:
        raise DoesNotApply("the model makes its masks in another way")
    for home in masking:
        patch.setattr(home, "create_attention_mask", lambda *arguments, **options: None)


@fault("NEG001")
def blind_to_what_was_read(patch: Planter) -> None:
    """Logits hardly depend on anything: whatever is wrong with a cache, nobody would see it."""
    _forward(patch, lambda model, tokens, own: own() * 0 + 1.0)


@fault("TOP001", needs="manifest")
def another_cache_than_declared(patch: Planter) -> None:
    """The model makes one cache more than its manifest says."""
    own = _make_cache(patch)
    patch.setattr(patch.module.Model, "make_cache", lambda self: [*own(self), KVCache()])


@fault("TOP003", needs="slots", undecided=True)
def a_cache_class_of_its_own(patch: Planter) -> None:
    """The model's first cache is of a class that nobody has audited."""
    own = _make_cache(patch)

    class LayerCache(KVCache):  # type: ignore[misc]
        """Looks like mlx-lm's, and may do anything."""

    patch.setattr(patch.module.Model, "make_cache", lambda self: [LayerCache(), *own(self)[1:]])


def _make_cache(patch: Planter) -> Callable[[nn.Module], list[Any]]:
    own = getattr(patch.module.Model, "make_cache", None)
    if own is None:
        raise DoesNotApply("the model leaves its caches to mlx-lm")
    return own  # type: ignore[no-any-return]
