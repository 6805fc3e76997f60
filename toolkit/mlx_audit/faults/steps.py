"""What a decode step may make of its arguments."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_audit.caches import FixedCapacityKVCache as Cache
from mlx_audit.decode import CompiledDecodeSession as Session
from mlx_audit.decode import DecodeStep, run
from mlx_audit.faults.base import Patch, fault


@fault("STA001", needs="alike")
def caches_in_another_order(patch: Patch) -> None:
    """The states of the first two layers come out exchanged."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        logits, (first, second, *rest) = own(self, parameters, state, tokens)
        return logits, [second, first, *rest]

    patch.setattr(DecodeStep, "__call__", call)


@fault("TRC003")
def parameters_captured(patch: Patch) -> None:
    """The step takes no notice of the parameters that it is given: the trace captures those on the module."""
    own = DecodeStep.__call__

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        return own(self, [slot.container[slot.key] for slot in self.slots()], state, tokens)

    patch.setattr(DecodeStep, "__call__", call)


@fault("LIF002")
def parameters_copied(patch: Patch) -> None:
    """The step uses copies of the weights that it made when it was built."""
    own, own_init = DecodeStep.__call__, DecodeStep.__init__

    def init(self: DecodeStep, model: Any, caches: Any) -> None:
        own_init(self, model, caches)
        self._copied = [mx.array(array) for array in self.parameters()]  # type: ignore[attr-defined]

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        return own(self, self._copied, state, tokens)  # type: ignore[attr-defined]

    patch.setattr(DecodeStep, "__init__", init)
    patch.setattr(DecodeStep, "__call__", call)


@fault("LIF002")
def parameters_gathered_once(patch: Patch) -> None:
    """The parameters are those of the first call, for ever."""
    own = DecodeStep.parameters

    def parameters(self: DecodeStep) -> list[mx.array]:
        if not hasattr(self, "_gathered"):
            self._gathered = [mx.array(array) for array in own(self)]  # type: ignore[attr-defined]
        return self._gathered  # type: ignore[attr-defined, no-any-return]

    patch.setattr(DecodeStep, "parameters", parameters)


@fault("TRC002", needs="linear")
def state_comes_out_wider(patch: Patch) -> None:
    """Keys come out as float32, whatever went in."""

    def update_and_fetch(self: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys.astype(mx.float32), keys, self._position, axes=(2,))
        self.values = mx.slice_update(self.values, values, self._position, axes=(2,))
        self._position = self._position + keys.shape[2]
        read, other = self.keys_and_values()
        return read.astype(values.dtype), other

    patch.setattr(Cache, "update_and_fetch", update_and_fetch)


@fault("STA001", needs="linear")
def cache_in_half_precision(patch: Patch) -> None:
    """What is handed over is rounded to bfloat16."""
    own = Cache.adopt.__func__  # type: ignore[attr-defined]

    def adopt(cls: type[Cache], native: Any, max_tokens: int) -> Cache:
        cache = own(cls, native, max_tokens)
        cache.keys = cache.keys.astype(mx.bfloat16).astype(cache.keys.dtype)
        return cache

    patch.setattr(Cache, "adopt", classmethod(adopt))


@fault("LIF001")
def failed_step_leaves_tracers_on_the_module(patch: Patch) -> None:
    """Nothing is put back when the forward raises."""
    from mlx_audit.decode import step as steps

    class Forgetful(steps.ModuleState):
        def restore(self, **_: Any) -> None:
            pass

    patch.setattr(steps, "ModuleState", Forgetful)


@fault("LIF001")
def failed_step_leaves_tracers_in_the_state(patch: Patch) -> None:
    """The step works in the caller's own lists, and leaves its placeholders in them."""
    held: list[Any] = []
    working: list[Any] = []

    def call(self: DecodeStep, parameters: Any, state: Any, tokens: Any) -> Any:
        for slot, parameter in zip(self.slots(), parameters, strict=True):
            held.append((slot.container, slot.key, slot.container[slot.key]))
            slot.container[slot.key] = parameter
        try:
            caches = [cache.with_state(arrays) for cache, arrays in zip(self.caches, state, strict=True)]
            logits = run(self.model, tokens[:, None], caches)
        finally:
            while held:
                container, key, value = held.pop()
                container[key] = value
            for arrays, given in zip(working[0], state, strict=True):
                arrays[:] = given
        return logits, [cache.state for cache in caches]

    own = Session.step

    def step(self: Session, tokens: Any) -> mx.array:
        working[:] = [self._state]
        return own(self, tokens)

    patch.setattr(DecodeStep, "__call__", call)
    patch.setattr(Session, "step", step)


@fault("LIF002")
def parameters_replaced_only(patch: Patch) -> None:
    """The parameters are copied whenever one was replaced: changes in place go unseen."""
    own = DecodeStep.parameters

    def parameters(self: DecodeStep) -> list[mx.array]:
        now = own(self)
        seen = getattr(self, "_seen", ())
        if len(now) != len(seen) or any(a is not b for a, b in zip(now, seen, strict=True)):
            self._seen, self._gathered = now, [mx.array(array) for array in now]  # type: ignore[attr-defined]
        return self._gathered  # type: ignore[attr-defined, no-any-return]

    patch.setattr(DecodeStep, "parameters", parameters)
