"""Is the declared topology the one that the model has?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.subject import Subject
from mlx_audit.manifests import CacheSpec
from mlx_audit.models import layer_types
from mlx_audit.models.live import entry_name, is_mlx_lms, live_specs, unknown_classes


class DeclaredTopology(Check):
    """The manifest's topology equals the live `make_cache()`.

    What it does:
        Builds the model without weights, asks it for its caches, and compares class and parameters entry by entry,
        and part by part inside composites, with what the manifest's rules give for the same arguments. `layers` is the
        live caches in order, each with how many equal ones stand in a row.

    Why:
        Adapters are made from the declaration. A layer declared as full attention that is sliding would attend to
        tokens that the model never sees in eager decoding.

    Example:
        cache 3: make_cache() gives rotating(window=8, keep=0), declared is linear

    How to fix:
        Correct `topology:` in the manifest; `mlx-audit inspect TARGET` shows the live one.

    Sources:
        mlx_lm/models/cache.py make_prompt_cache
    """

    code = "TOP001"
    tier = "static"
    requires = ("TOP003",)

    def not_applicable(self, subject: Subject) -> str | None:
        return "no manifest declares a topology" if subject.expected is None else None

    def run(self, subject: Subject) -> Figures:
        declared, live = list(subject.expected or ()), live_specs(subject.lazy_model)
        figures: Figures = {"caches": len(live), "kinds": _kinds(live), "layers": _layers(live)}
        if len(declared) != len(live):
            raise CheckFailed(
                f"make_cache() gives {len(live)} entries, declared are {len(declared)}",
                where="topology",
                figures=figures,
            )
        for index, (want, got) in enumerate(zip(declared, live, strict=True)):
            # Caches of a class that is not known stand here only where the model brings fixed ones of its own.
            if got != want and not any(unknown_classes(got, "")):
                raise CheckFailed(
                    f"cache {index}: make_cache() gives {got.label()}, declared is {want.label()}",
                    where=f"topology.layers[{want.rule}]",
                    figures=figures,
                )
        return figures


class LayerKindsExercised(Check):
    """Every layer kind that the variant's configurations reach is exercised by the tiny one.

    What it does:
        Collects the topology rules that apply to any published configuration of the variant and to this one, and asks
        that each also applies to the tiny configuration, which is what the numeric tier runs.

    Why:
        A layer kind that the tiny model lacks is never run, so nothing would be known about it.

    Example:
        rule 0 (reached by openai--gpt-oss-20b) is not reached by `tiny`

    How to fix:
        Change `tiny:` in the manifest so that every rule applies to at least one layer.

    Sources:
        the manifest's `topology.layers`
    """

    code = "TOP002"
    tier = "static"
    requires = ("TOP001",)

    def not_applicable(self, subject: Subject) -> str | None:
        return "no manifest declares rules" if subject.expected is None else None

    def run(self, subject: Subject) -> Figures:
        missing = {rule: by for rule, by in subject.reachable.items() if rule not in subject.exercised}
        for rule, by in sorted(missing.items()):
            raise CheckFailed(
                f"rule {rule} (reached by {by}) is not reached by `tiny`", where=f"topology.layers[{rule}]"
            )
        return {"rules": len(subject.exercised)}


class KnownCacheClasses(Check):
    """Every cache class is known, and has a fixed-capacity form.

    What it does:
        Looks at the exact class of each entry of `make_cache()`, and of each part of a composite. Any other class than
        the kinds of a manifest stand for, be it the model's own or mlx-lm's, leaves the verdict undecided.

    Why:
        A subclass may change what an update means. Treating it as its base class would be a guess.

    Example:
        layer 0: mlx_lm.models.deepseek_v41.LayerCache is not a cache class of mlx-lm

    How to fix:
        Give the model a `new_fixed_capacity_cache` of its own (see FixedCapacityKVCacheProviding), which is audited
        alike.

    Sources:
        mlx_lm/models/cache.py
    """

    code = "TOP003"
    tier = "static"

    def not_applicable(self, subject: Subject) -> str | None:
        if hasattr(subject.lazy_model, "new_fixed_capacity_cache"):
            return "the model provides its own fixed-capacity caches"
        return None

    def run(self, subject: Subject) -> Figures:
        live = live_specs(subject.lazy_model)
        _require_known(subject, live)
        return {"caches": len(live)}


class LayerTypesAgree(Check):
    """Each live cache keeps what the configuration's own `layer_types` says of its layer.

    What it does:
        Compares the live caches, layer by layer, with what transformers' static cache makes of the same key: all
        tokens for full_attention, the last `sliding_window` for sliding_attention, the chunk of `attention_chunk_size`
        for chunked_attention, a state for linear_attention, mamba and conv, both for hybrid, nothing for moe. A cache
        may keep more tokens than the layer attends to; the figures name it. A type that is not in the table leaves the
        verdict undecided.

    Why:
        The manifest and `make_cache()` may share a mistake. The configuration was published with the weights: a
        full-attention layer on a ring loses text that the model was trained to see.

    Example:
        layer 3 is full_attention: it keeps every token; its cache is rotating(window=128, keep=0)

    How to fix:
        Look at the model's `make_cache()` and at its reading of `layer_types`. If the configuration is wrong, correct
        it and say so in the manifest.

    Sources:
        transformers 5.24.0, cache_utils.py STATIC_LAYER_TYPE_MAPPING and configuration_utils.py
        _LEGACY_LAYER_TYPE_REMAP
    """

    code = "TOP004"
    tier = "static"
    requires = ("TOP003",)

    def not_applicable(self, subject: Subject) -> str | None:
        has = layer_types.text_config(subject.config).get("layer_types") is not None
        return None if has else "the configuration has no layer_types"

    def run(self, subject: Subject) -> Figures:
        config = layer_types.text_config(subject.config)
        live = live_specs(subject.lazy_model)
        _require_known(subject, live)
        before = sum(spec.rule < 0 for spec in subject.expected or ())
        try:
            layers = layer_types.cached_layers(config)
            return self._compare(config, layers, live[before:])
        except layer_types.Undecidable as error:
            raise NotRun(str(error)) from error

    def _compare(
        self, config: Mapping[str, Any], layers: Sequence[int], live: Sequence[CacheSpec]
    ) -> Figures:
        names = config["layer_types"]
        if len(layers) != len(live):
            raise CheckFailed(
                f"layer_types has {len(layers)} layers with a cache, of {len(names)}; make_cache() gives {len(live)}",
                where="layer_types",
            )
        types = [names[index] for index in layers]
        for index, name, spec in zip(layers, types, live, strict=True):
            wanted = layer_types.disagreement(name, spec, config)
            if wanted is not None:
                raise CheckFailed(
                    f"layer {index} is {name}: {wanted}; its cache is {spec.label()}",
                    where=f"layer_types[{index}]",
                )
        wider = sum(map(layer_types.keeps_more, types, live))
        found = {"layers": layer_types.agreed(types, live), "without_cache": len(names) - len(layers)}
        return {**found, "keep_more_than_needed": wider}


def _require_known(subject: Subject, live: Sequence[CacheSpec]) -> None:
    """Leave undecided what a cache of an unknown class means."""
    unknown = [
        found
        for index, spec in enumerate(live)
        for found in unknown_classes(spec, entry_name(subject.lazy_model, index, len(live)))
    ]
    if unknown:
        place, name = unknown[0]
        what = "has no fixed-capacity form" if is_mlx_lms(name) else "is not a cache class of mlx-lm"
        more = f" (and {len(unknown) - 1} more places)" if unknown[1:] else ""
        raise NotRun(f"{place}: {name} {what}{more}")


def _layers(specs: Sequence[CacheSpec]) -> list[list[Any]]:
    return [[label, len(list(run))] for label, run in groupby(spec.label() for spec in specs)]


def _kinds(specs: Sequence[CacheSpec]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.kind] = counts.get(spec.kind, 0) + 1
    return counts
