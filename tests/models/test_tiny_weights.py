"""Tiny models have weights that tests can see through."""

from __future__ import annotations

from importlib import import_module

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_audit.manifests import Manifest, load_manifests
from mlx_audit.models.build import build_tiny, resolve_arguments


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.family)
def test_no_matrix_or_kernel_is_zero(manifest: Manifest) -> None:
    """mlx-lm leaves some at zero for a checkpoint to fill; attention over zero keys and values shows no fault."""
    module = import_module(manifest.module)
    for variant in manifest.variants.values():
        model = build_tiny(module, resolve_arguments(module, variant.tiny), seed=0)
        weights = tree_flatten(model.parameters())
        assert [path for path, array in weights if array.ndim > 1 and not mx.any(array).item()] == []


def test_the_weights_come_from_the_seed() -> None:
    module = import_module("mlx_lm.models.baichuan_m1")
    manifest = next(m for m in load_manifests() if m.family == "baichuan_m1")
    arguments = resolve_arguments(module, manifest.variants["mixed"].tiny)
    kernels = [
        build_tiny(module, arguments, seed=seed).model.layers[0].self_attn.conv_k for seed in (0, 0, 1)
    ]
    assert mx.array_equal(kernels[0], kernels[1])
    assert not mx.array_equal(kernels[0], kernels[2])
