"""Nothing is met across models, settings or tenants: each field counts, typed, and none runs into another."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_audit.errors import ShapeMismatch
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.prefix.fingerprint import Fingerprint, checkpoint_digest, of_model, weights_digest
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from tiny_models import SIZES, module_of, tiny_model

FIELDS = [field.name for field in dataclasses.fields(Fingerprint)]


def test_adapter_and_salt_do_not_collide_nor_do_absent_and_empty_nor_pictures() -> None:
    worlds = [
        Fingerprint(adapter="X"),
        Fingerprint(salt="X"),
        Fingerprint(adapter="X", salt=""),
        Fingerprint(),
        Fingerprint(media=("picture 1",)),
        Fingerprint(media=("picture 2",)),
        Fingerprint(media=("pic", "ture 1")),
        Fingerprint(media=()),
        Fingerprint(salt=""),
        Fingerprint(tenant="X"),
    ]
    assert len({world.digest for world in worlds}) == len(worlds)
    for one, other in itertools.permutations(worlds, 2):
        with pytest.raises(PrefixRefused) as caught:
            one.require_same(other.parts, "here")
        assert caught.value.reason is Reason.OTHER_FINGERPRINT
    for world in worlds:
        world.require_same(world.parts, "here")


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_counts_and_is_named(name: str) -> None:
    values: list[Any] = [None, "", "1", 1, True, b"1", ("1",), (), (("1",),), ("1", ""), (None,)]
    worlds = [Fingerprint(**{name: value}) for value in values]
    assert len({world.digest for world in worlds}) == len(values)
    with pytest.raises(PrefixRefused, match=f"another {name}"):
        worlds[0].require_same(worlds[1].parts, "here")


def test_the_digest_is_the_same_in_every_process() -> None:
    world = Fingerprint(weights="w", window=4096, media=("a", b"b"), salt="")
    assert world.digest == "8c51ad6d447e3fc02b7f64e5f0c4ae18412d8e8dd3627073b709ab03ec6e4718"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
_WORLDS = st.dictionaries(st.sampled_from(FIELDS), _VALUES, max_size=4)


def typed(value: Any) -> Any:
    """Return a value that Python compares with its type: `True == 1`."""
    return (type(value), tuple(map(typed, value)) if isinstance(value, tuple) else value)


@settings(max_examples=50)
@given(one=_WORLDS, other=_WORLDS)
def test_digests_are_equal_only_for_equal_worlds(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = all(typed(one.get(name)) == typed(other.get(name)) for name in FIELDS)
    assert (Fingerprint(**one).digest == Fingerprint(**other).digest) == same
    assert (Fingerprint(**one).parts == Fingerprint(**other).parts) == same


def test_a_field_that_this_version_does_not_know_is_another_world() -> None:
    world = Fingerprint()
    with pytest.raises(PrefixRefused, match="another colour"):
        world.require_same({**world.parts, "colour": "blue"}, "here")
    with pytest.raises(PrefixRefused, match="another salt"):
        world.require_same({name: part for name, part in world.parts.items() if name != "salt"}, "here")


def test_a_value_without_an_encoding_is_an_error() -> None:
    with pytest.raises(ShapeMismatch, match="float"):
        _ = Fingerprint(window=1.5).digest  # type: ignore[arg-type]


def test_a_live_model_tells_its_weights_quantization_and_dtype() -> None:
    model, again, other = tiny_model(), tiny_model(), tiny_model(seed=1)
    world = of_model(model, salt="s")
    assert world.digest == of_model(again, salt="s").digest
    assert differing(world, of_model(other, salt="s")) == {"weights"}
    assert differing(world, of_model(tiny_model(dtype="bfloat16"), salt="s")) == {"weights", "dtype"}
    nn.quantize(again, group_size=32, bits=4)
    assert differing(world, of_model(again, salt="s")) >= {"weights", "quantization"}
    assert differing(world, of_model(model, salt="t")) == {"salt"}
    assert differing(world, of_model(model, salt="s", weights="mine")) == {"weights"}
    model.update({"model": {"norm": {"weight": model.model.norm.weight + 1}}})
    assert weights_digest(model) != world.weights


@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 8192, 9999])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_one_value_of_any_array_counts(place: int, dtype: str) -> None:
    model = nn.Module()
    model.weight = mx.zeros((10_000,), getattr(mx, dtype))
    before = weights_digest(model)
    model.weight = model.weight.at[place].add(1)
    assert weights_digest(model) != before


def test_what_is_no_parameter_counts_too() -> None:
    module = module_of("llama")
    config = {**SIZES, "model_type": "llama"}
    one, other = (
        of_model(build_tiny(module, resolve_arguments(module, {**config, "rope_theta": theta}), seed=0))
        for theta in (10_000.0, 20_000.0)
    )
    assert differing(one, other) == {"model"}


def test_a_private_array_that_another_thread_left_lazy_does_not_hinder() -> None:
    def build() -> None:
        model._private = mx.zeros((2,)) + 1
        mx.clear_streams()

    model = nn.Module()
    model.weight = mx.zeros((2,))
    before = weights_digest(model)
    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert weights_digest(model) == weights_digest(model) != before


def test_a_checkpoint_tells_a_fine_tuned_one_of_equal_header_and_size(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    weights = mx.random.normal((300, 100))
    for folder, array in ((base, weights), (tuned, weights + 1e-3)):
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), {"w": array})
    sizes = {(folder / "model.safetensors").stat().st_size for folder in (base, tuned)}
    assert len(sizes) == 1
    for whole in (False, True):
        assert checkpoint_digest(base, whole=whole) == checkpoint_digest(base, whole=whole)
        assert checkpoint_digest(base, whole=whole) != checkpoint_digest(tuned, whole=whole)
    before = checkpoint_digest(base)
    (base / "model.safetensors").rename(base / "renamed.safetensors")
    assert checkpoint_digest(base) != before


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"x", struct.pack("<Q", 0)]
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(PrefixRefused) as caught:
        checkpoint_digest(tmp_path)
    assert caught.value.reason is Reason.DAMAGED
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(PrefixRefused, match="files to digest"):
        checkpoint_digest(tmp_path)


def differing(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {name for name in FIELDS if one.parts[name] != other.parts[name]}
