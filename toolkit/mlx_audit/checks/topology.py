"""Is the declared topology the one that the model has?"""

from __future__ import annotations

from mlx_audit.caches import cache_class
from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.subject import Subject
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.live import live_specs


class DeclaredTopology(Check):
    """The manifest's topology equals the live `make_cache()`.

    What it does:
        Builds the model without weights, asks it for its caches, and compares class and parameters entry by entry
        with what the manifest's rules give for the same arguments.

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

    def not_applicable(self, subject: Subject) -> str | None:
        return "no manifest declares a topology" if subject.expected is None else None

    def run(self, subject: Subject) -> Figures:
        declared, live = list(subject.expected or ()), live_specs(subject.lazy_model)
        if len(declared) != len(live):
            raise CheckFailed(
                f"make_cache() gives {len(live)} entries, declared are {len(declared)}", where="topology"
            )
        for index, (want, got) in enumerate(zip(declared, live, strict=True)):
            if not isinstance(got, str) and got != want:
                raise CheckFailed(
                    f"cache {index}: make_cache() gives {got.label()}, declared is {want.label()}",
                    where=f"topology.layers[{want.rule}]",
                )
        return {"caches": len(live), "kinds": _kinds(live)}


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
        Looks at the exact class of each entry of `make_cache()`. A class of the model's own fails; a kind of mlx-lm's
        that has no fixed-capacity cache here yet leaves the verdict undecided.

    Why:
        A subclass may change what an update means. Treating it as its base class would be a guess.

    Example:
        cache 0: mlx_lm.models.deepseek_v41.LayerCache is not a cache class of mlx-lm

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
        for index, spec in enumerate(live):
            if isinstance(spec, str):
                raise CheckFailed(f"cache {index}: {spec} is not a cache class of mlx-lm", where=spec)
        for index, spec in enumerate(live):
            if isinstance(spec, CacheSpec) and cache_class(spec.kind) is None:
                raise NotRun(f"cache {index}: there is no fixed-capacity cache for kind {spec.kind} yet")
        return {"caches": len(live)}


def _kinds(specs: list[CacheSpec | str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for spec in specs:
        name = spec if isinstance(spec, str) else spec.kind
        counts[name] = counts.get(name, 0) + 1
    return counts
