"""A session's caches and position in one safetensors file, which is read as untrusted."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from mlx_audit.caches import FixedCapacityCache
from mlx_audit.decode.step import DecodeStep, State
from mlx_audit.errors import MlxAuditError, SavedSessionInvalid

FORMAT = "mlx-audit/session/1"
_KEY = "mlx_audit"
_MOST_METADATA = 1 << 20
_SAMPLED = 16


@dataclass(frozen=True)
class SavedState:
    """A saved session, checked for its form but not yet against a model."""

    path: Path
    capacity: int
    batch_size: int
    position: int
    kinds: list[str]
    ragged: bool
    module: str
    weights: str
    arrays: dict[str, mx.array]

    def state_for(self, step: DecodeStep) -> State:
        """Return the state in the layout of `step`.

        Raises:
            SavedSessionInvalid: the file belongs to another model or layout.
        """
        self._require("model module", self.module, type(step.model).__module__)
        self._require("weights", self.weights, weights_digest(step))
        self._require("cache kinds", self.kinds, [cache.kind for cache in step.caches])
        state: State = []
        for index, cache in enumerate(step.caches):
            arrays = []
            for part, like in enumerate(cache.state):
                name = f"{index}.{part}"
                array = self.arrays.get(name)
                if array is None:
                    raise self.invalid("an array is missing", name, None)
                self._require(f"array {name}", (array.shape, array.dtype), (like.shape, like.dtype))
                # Read now: MLX would do so in the middle of a step, long after the file may have changed.
                try:
                    mx.eval(array)
                except RuntimeError as error:
                    raise self.invalid(f"array {name} cannot be read", error, None) from error
                if not mx.isfinite(array).all():
                    # A masked slot is still multiplied by zero, so one NaN anywhere spoils every logit.
                    raise self.invalid(
                        f"array {name} holds values that are not finite", None, "finite numbers"
                    )
                arrays.append(array)
            held = self._held(cache.with_state(arrays), index)
            if held is not None:
                self._require(f"position of cache {index}", held, self.position)
            state.append(arrays)
        self._require("arrays", len(self.arrays), sum(len(arrays) for arrays in state))
        return state

    def _held(self, cache: FixedCapacityCache, index: int) -> int | None:
        """Return the tokens that a cache holds, each row and part of it checked."""
        try:
            cache.require_sound()
        except MlxAuditError as error:
            raise self.invalid(f"position of cache {index} cannot be", error, None) from error
        return cache.count()

    def _require(self, what: str, found: Any, allowed: Any) -> None:
        if found != allowed:
            raise self.invalid(f"{what} does not fit the model", found, allowed)

    def invalid(self, what: str, found: Any, allowed: Any) -> SavedSessionInvalid:
        """Return the error that refuses this file."""
        return SavedSessionInvalid(
            what, where=str(self.path), found=found, allowed=allowed, fix="prefill a new session and save it"
        )


def save_state(path: Path, step: DecodeStep, state: State, position: int) -> None:
    """Write `state` to `path`; a reader sees the old file or the new one, never a part."""
    arrays = {f"{i}.{j}": array for i, arrays in enumerate(state) for j, array in enumerate(arrays)}
    header = {
        "format": FORMAT,
        "capacity": step.caches[0].capacity,
        "batch_size": next(cache.rows for cache in step.caches if cache.state),
        "position": position,
        "kinds": [cache.kind for cache in step.caches],
        "ragged": any(cache.ragged for cache in step.caches),
        "module": type(step.model).__module__,
        "weights": weights_digest(step),
    }
    descriptor, name = tempfile.mkstemp(
        dir=path.parent or ".", prefix=f".{path.name}.", suffix=".safetensors"
    )
    os.close(descriptor)
    try:
        mx.save_safetensors(name, arrays, {"format": "mlx", _KEY: json.dumps(header, sort_keys=True)})
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def weights_digest(step: DecodeStep) -> str:
    """Return a digest of the model's weights: form of each, and a few of its values, spread over it.

    A cache continues only with the weights that filled it. Reading all of a large model would take seconds, so this
    tells models apart; it does not authenticate them.
    """
    total = hashlib.sha256()
    slots = step.slots()
    flat = [mx.reshape(slot.container[slot.key], (-1,)) for slot in slots]
    samples = [mx.view(array[:: max(1, array.size // _SAMPLED)][:_SAMPLED], mx.uint8) for array in flat]
    mx.eval(samples)
    for slot, sample in zip(slots, samples, strict=True):
        array = slot.container[slot.key]
        total.update(f"{slot.path} {array.shape} {array.dtype} ".encode() + np.array(sample).tobytes())
    return f"sha256:{total.hexdigest()}"


def load_state(path: Path) -> SavedState:
    """Read and check a saved session.

    Raises:
        SavedSessionInvalid: not a safetensors file, another format version, or values out of range.
    """

    def invalid(what: str, found: Any = None, allowed: Any = None) -> SavedSessionInvalid:
        return SavedSessionInvalid(
            what,
            where=str(path),
            found=found,
            allowed=allowed,
            fix="give a file that session.save(path) wrote",
        )

    if not path.is_file():
        raise invalid("there is no such file")
    try:
        # The header is checked against the file's size before MLX maps any of it.
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise invalid("not a readable safetensors file", error) from error
    text = metadata.get(_KEY, "")
    if not text or len(text) > _MOST_METADATA:
        raise invalid("no session header", f"metadata keys {sorted(metadata)[:5]}", f"a `{_KEY}` entry")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("the session header is not JSON", error) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise invalid(
            "another format version", header.get("format") if isinstance(header, dict) else header, FORMAT
        )
    sizes = {}
    for key in ("capacity", "batch_size", "position"):
        value = header.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise invalid(f"`{key}` is not usable", value, "an integer from 0")
        sizes[key] = value
    if sizes["position"] > sizes["capacity"] or not sizes["capacity"] or not sizes["batch_size"]:
        raise invalid("the sizes contradict each other", sizes)
    kinds = header.get("kinds")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise invalid("`kinds` is not usable", kinds, "a list of cache kinds")
    ragged = header.get("ragged", False)
    if not isinstance(ragged, bool):
        raise invalid("`ragged` is not usable", ragged, "true or false")
    arrays = mx.load(str(path), format="safetensors")
    if not isinstance(arrays, dict):
        raise invalid("not a dictionary of arrays")
    rows = {array.shape[0] for array in arrays.values() if array.ndim > 1}
    if rows != {sizes["batch_size"]}:
        # Before any cache is made: what the file really holds bounds what it can ask for.
        raise invalid("`batch_size` is not that of the arrays", sizes["batch_size"], rows)
    return SavedState(
        path=path,
        kinds=kinds,
        ragged=ragged,
        module=str(header.get("module")),
        weights=str(header.get("weights")),
        arrays=arrays,
        **sizes,
    )
