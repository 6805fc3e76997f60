"""Which adapter serves a model: its own, one that is registered for its module, or the generic one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Literal, TypeGuard

import mlx.nn as nn

import mlx_audit
from mlx_audit.adapters.generic import GenericAdapter
from mlx_audit.adapters.protocol import FixedCapacityKVCacheProviding
from mlx_audit.errors import NotCompileCapable, describe
from mlx_audit.evidence import identify
from mlx_audit.evidence.registered import adapter_digest, adapter_files, label, registered_adapter


def adapter_for(
    model: nn.Module, *, evidence: Literal["required", "ignore"] = "required"
) -> FixedCapacityKVCacheProviding:
    """Return what makes fixed-capacity caches for a model.

    A model that provides them itself is taken at its word. Otherwise the adapter that is registered for its module
    serves (entry point group `mlx_audit.adapters`); where there is none, the topology decides.

    Args:
        model: An mlx-lm model.
        evidence: `required` takes the topology from the manifest that declares the model, and refuses a model that
            none declares; `ignore` reads it off the model's own `make_cache()`.

    Raises:
        NotCompileCapable: no manifest covers the model, a cache class has no fixed-capacity form, or the registered
            adapter cannot be used; a broken adapter is never replaced by the generic one.
    """
    if _provides(model):
        return model
    special = _registered(model)
    if special is not None:
        return special
    if evidence == "ignore":
        return GenericAdapter(model)
    manifest, _, arguments = identify(model)
    return GenericAdapter(model, manifest.cache_specs(arguments))


def _registered(model: nn.Module) -> FixedCapacityKVCacheProviding | None:
    """Return the registered adapter of a model, or None where there is none."""
    module = type(model).__module__
    found = registered_adapter(module)
    if found is None:
        return None
    adapter_digest(module)  # what nobody could have digested has no record, and so is not run either

    def unusable(why: object) -> NotCompileCapable:
        return NotCompileCapable(
            f"the adapter that is registered for {module} cannot be used",
            where=label(found),
            found=why,
            fix="mend or uninstall it",
        )

    try:
        adapter = found.load()(model)
    except (Exception, SystemExit) as error:
        raise unusable(describe(error)) from error
    if not _provides(adapter):
        raise unusable(f"{type(adapter).__name__} has no method new_fixed_capacity_cache")
    code = _code_file(adapter)
    own = Path(mlx_audit.__file__).resolve().parent
    if code is None or (code not in map(Path.resolve, adapter_files(found)) and not code.is_relative_to(own)):
        raise unusable(f"its method lies in {code}, which its digest does not cover; import it by name")
    return adapter


def _provides(candidate: object) -> TypeGuard[FixedCapacityKVCacheProviding]:
    """Return whether an object makes caches; `isinstance` would remember a class that has lost its method since."""
    return callable(getattr(candidate, "new_fixed_capacity_cache", None))


def _code_file(adapter: FixedCapacityKVCacheProviding) -> Path | None:
    """Return the file that an adapter's method was compiled from."""
    code = getattr(inspect.unwrap(adapter.new_fixed_capacity_cache), "__code__", None)
    return Path(code.co_filename).resolve() if code is not None else None
