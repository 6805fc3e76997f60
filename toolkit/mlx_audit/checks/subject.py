"""What checks look at: one configuration of one variant, built when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.adapters import FixedCapacityKVCacheProviding, adapter_for
from mlx_audit.checks.profiles import PROFILES, Profile
from mlx_audit.checks.tolerance import Tolerance, tolerance_for
from mlx_audit.evidence.environment import backend
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.build import build_lazy, build_tiny, resolve_arguments
from mlx_audit.models.checkpoint import Checkpoint
from mlx_audit.models.live import flat_specs
from mlx_audit.source import SourceReport, read_source
from mlx_audit.tracing import StepTracer, TraceProof, prove

_REORDER = ("rotating", "chunked", "quantized")
"""Kinds whose keys may stand in another order than eager decoding's."""


@dataclass(frozen=True)
class Source:
    """A model's code as text.

    Attributes:
        file: The model file.
        overlay: Patched sources that are read in place of the installed ones.
    """

    file: Path
    overlay: Mapping[str, Path] = field(default_factory=dict)

    def report(self) -> SourceReport:
        """Return who reads the position, and how; each file is read once."""
        return _report(self.overlay.get(str(self.file), self.file), tuple(sorted(self.overlay.items())))


@cache
def _report(file: Path, overlay: tuple[tuple[str, Path], ...]) -> SourceReport:
    return read_source(file, dict(overlay))


@dataclass
class Subject:
    """One configuration.

    Attributes:
        family, variant, configuration: Names that results carry.
        module: The model module.
        config: The configuration that the static and trace tiers look at, of any size.
        tiny: The configuration that the numeric tier builds with weights.
        expected: Cache entries that the manifest declares for `config`, or None without a manifest.
        reachable: Topology rules that the variant's configurations reach, by rule number, with one configuration each.
        exercised: Topology rules that `tiny` reaches.
        exactness: `exact`, `reordered` or `kernel`; empty where nobody declared it, so that the caches decide.
        rope: RoPE kind of both configurations.
        main: Whether this is the variant's main configuration: on others, the numeric tier is a single pass.
        decodes: Whether compiled decoding is claimed, or nobody said that it is not; else nothing compiled is asked of
            what was restored.
        checkpoint: Folder or GGUF file with real weights, or None.
        original: The model module without its patch, where it is patched.
        overlay: The patched sources.
    """

    family: str
    variant: str
    configuration: str
    module: ModuleType
    config: dict[str, Any]
    tiny: dict[str, Any]
    expected: Sequence[CacheSpec] | None = None
    reachable: dict[int, str] = field(default_factory=dict)
    exercised: set[int] = field(default_factory=set)
    exactness: str = "exact"
    rope: str = "default"
    main: bool = True
    decodes: bool = True
    checkpoint: Path | None = None
    original: ModuleType | None = None
    overlay: Mapping[str, Path] = field(default_factory=dict)
    profile: str = "quick"
    dtype: str = "float32"
    seed: int = 0

    @property
    def source(self) -> Source:
        """The model's code as text."""
        return Source(Path(self.module.__file__ or ""), self.overlay)

    @property
    def amounts(self) -> Profile:
        """How much to do."""
        return PROFILES[self.profile]  # type: ignore[index]

    @cached_property
    def exactness_class(self) -> str:
        """The declared class, or what the caches allow: a ring, or a choice of keys, sums in another order."""
        if self.exactness:
            return self.exactness
        return "reordered" if any(spec.kind in _REORDER for spec in flat_specs(self.lazy_model)) else "exact"

    @property
    def tolerance(self) -> Tolerance:
        """What a logit may differ by on this backend."""
        return tolerance_for(self.exactness_class, self.dtype, backend())

    @cached_property
    def arguments(self) -> Any:
        """The model's resolved arguments for `config`."""
        return resolve_arguments(self.module, self.config)

    @cached_property
    def lazy_model(self) -> nn.Module:
        """The model of `config`, whose parameters are never evaluated."""
        model = build_lazy(
            self.module,
            self.arguments,
            dtype=_dtype_of(self.config),
            quantization=self.config.get("quantization"),
        )
        # Nothing is ever computed from them here, and a graph of random numbers behind each would be walked often.
        model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))
        return model

    @cached_property
    def tracer(self) -> StepTracer:
        """Traces the lazy model."""
        return StepTracer(self.lazy_model, self._provider(self.lazy_model))

    @cached_property
    def proof(self) -> TraceProof:
        """Six traces of the lazy model's step."""
        return prove(self.tracer)

    @cached_property
    def model(self) -> nn.Module:
        """The tiny model with evaluated random weights."""
        return self.tiny_model(self.dtype)

    def tiny_model(self, dtype: str) -> nn.Module:
        """Return a new tiny model in a dtype; the weights depend on the seed alone."""
        return build_tiny(self.module, resolve_arguments(self.module, self.tiny), seed=self.seed, dtype=dtype)

    @cached_property
    def real(self) -> Checkpoint:
        """The checkpoint, loaded once for all checks."""
        assert self.checkpoint is not None, "checks of the checkpoint tier need one"
        # On CPUs, matrices of half precision are many times slower.
        return Checkpoint(self.checkpoint, dtype="float32" if backend() == "cpu" else "float16")

    @cached_property
    def vocabulary(self) -> int:
        """Width of the tiny model's logits."""
        # Lazily, in float32: whether it can be evaluated in another dtype is a check's business. With caches: a
        # forward may take their position unasked.
        model = build_lazy(self.module, resolve_arguments(self.module, self.tiny))
        return int(model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model)).shape[-1])

    def _provider(self, model: nn.Module) -> FixedCapacityKVCacheProviding:
        return adapter_for(model, evidence="ignore")


def _dtype_of(config: dict[str, Any]) -> str:
    """Return the dtype that a published configuration names, bfloat16 where it names none that MLX decodes in."""
    named = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return named if named in ("float32", "bfloat16", "float16") else "bfloat16"
