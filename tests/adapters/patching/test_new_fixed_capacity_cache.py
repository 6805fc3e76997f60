"""The method that a patch gives a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_audit.adapters import FixedCapacityKVCacheProviding, GenericAdapter, adapter_for
from patched_families import compiled, eager, equal, mended, model_from, model_of, source_of, text, untouched

NAME = "new_fixed_capacity_cache"


@pytest.mark.parametrize("family", ["afm7", "gpt_bigcode"])
def test_the_model_makes_the_caches_that_the_generic_adapter_makes(tmp_path: Path, family: str) -> None:
    model = model_from(family, mended(source_of(family), NAME), tmp_path)
    assert isinstance(model, FixedCapacityKVCacheProviding)
    assert adapter_for(model) is model
    want = GenericAdapter(model_of(family)).new_fixed_capacity_cache(24, batch_size=2)
    for make in (model.new_fixed_capacity_cache, GenericAdapter(model).new_fixed_capacity_cache):
        got = make(24, batch_size=2)
        assert [type(cache) for cache in got] == [type(cache) for cache in want]
        assert [array.shape for cache in got for array in cache.state] == [
            array.shape for cache in want for array in cache.state
        ]


def test_a_session_takes_the_model_at_its_word(tmp_path: Path) -> None:
    model = model_from("llama", _plain(mended(source_of("llama"), NAME)), tmp_path)
    prompt, following = text(7), text(3, seed=4)
    assert equal(compiled(model, prompt, following), eager(model, prompt, following))


def test_it_stands_after_make_cache_or_at_the_end_of_the_class() -> None:
    after = mended(source_of("afm7"), NAME)
    assert after.index("def make_cache") < after.index(f"def {NAME}") < after.index("    def layers")
    assert (
        mended(source_of("gpt_bigcode"), NAME)
        .rstrip()
        .endswith("max_tokens, batch_size=batch_size\n        )")
    )


def test_a_model_that_has_the_method_keeps_it_and_other_files_get_none() -> None:
    source = mended(source_of("afm7"), NAME)
    assert untouched(source, NAME)
    assert untouched("class Other:\n    pass\n", NAME)
    assert untouched("class Model: pass\n", NAME)


def _plain(source: str) -> str:
    """Without the rotation that cannot be traced."""
    return source.replace("args.rope_scaling,", "None,").replace("self.args.rope_scaling", "None")
