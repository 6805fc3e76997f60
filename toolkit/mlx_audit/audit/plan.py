"""From a target to the subjects that its audit consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from mlx_audit.audit.events import PlannedCheck, PlannedSubject
from mlx_audit.audit.planting import subjects
from mlx_audit.audit.request import Options, Planting, Request
from mlx_audit.checks.base import Check, all_checks
from mlx_audit.checks.profiles import PROFILES
from mlx_audit.checks.subject import Source, Subject
from mlx_audit.errors import TargetError
from mlx_audit.evidence.codes import DECODE, RESTORE
from mlx_audit.evidence.results import TIERS, Tier, VerdictName
from mlx_audit.faults import Fault
from mlx_audit.manifests import Manifest, load_configuration
from mlx_audit.manifests.modules import module_file
from mlx_audit.models.build import declared_arguments, resolve_arguments
from mlx_audit.models.fitting import tiny_of
from mlx_audit.models.modules import import_file, import_model, import_patched
from mlx_audit.models.rope import rope_kind, tiny_name, with_rope
from mlx_audit.models.target import Target

_POSITIVE = ("capable", "limited")

_OWN_TIERS: tuple[Tier, ...] = ("static", "trace", "checkpoint")
"""Tiers that look at a configuration of any size; the numeric tier looks at tiny ones."""


@dataclass
class Entry:
    """A planned subject, the subject itself, and the checks to run on it.

    Attributes:
        planned: What the parent is told.
        subject: What the checks look at; None when nothing can be run.
        checks: In the order of `all_checks()`.
        blocked: Why nothing can be run.
        after: An entry whose results count as prerequisites here.
        fault: What is planted while the checks run.
        alone: Whether each check is run as if none had been before it.
        source: What can be read of a model that cannot be run.
    """

    planned: PlannedSubject
    subject: Subject | None
    checks: list[Check]
    blocked: str = ""
    after: int | None = None
    fault: Fault | None = None
    alone: bool = False
    source: Source | None = None


Modules = tuple[ModuleType, ModuleType | None]
"""A model's module; and as it is without the patch, where it is patched."""


@dataclass
class Plan:
    """The subjects of one target, in the order of their audit, and what is left out."""

    entries: list[Entry] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def make_plan(request: Request) -> Plan:
    """Return the plan of a target.

    Raises:
        TargetError: the model or a configuration cannot be used, or no variant covers the given one.
    """
    target = request.target()
    if request.planting is not None:
        return _planting(request.model_copy(update={"planting": None}), request.planting)
    if target.manifest is not None and (unmet := unmet_requirements(target.manifest.requires)):
        return _blocked(target, request.options, unmet)
    if request.unloadable:
        return _blocked(target, request.options, request.unloadable)
    try:
        modules = _modules(target)
    except TargetError as error:
        return _blocked(target, request.options, str(error))
    if target.manifest is None:
        return _without_manifest(target, modules, request.options)
    planner = _Planner(target, target.manifest, modules, request.options)
    return planner.given() if target.config is not None else planner.family()


def unmet_requirements(requires: Mapping[str, str]) -> str:
    """Return what is installed and does not meet a manifest's `requires`, as one sentence; empty when all is met."""
    unmet = []
    for package, specifier in requires.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            unmet.append(f"{package} is not installed, the manifest requires {specifier}")
            continue
        if not SpecifierSet(specifier).contains(installed, prereleases=True):
            unmet.append(f"{package} {installed} is installed, the manifest requires {specifier}")
    return "; ".join(unmet)


def _planting(request: Request, planting: Planting) -> Plan:
    """The main tiny subject of each variant, healthy and then with each fault."""
    found = [e.subject for e in make_plan(request).entries if e.subject is not None and e.subject.main]
    if request.manifest is None:
        bases = [replace(subject, config=subject.tiny) for subject in found]
    else:
        bases = [subject for subject in found if subject.config == subject.tiny]
    return Plan([Entry(*found[:3], fault=found[3], alone=True) for found in subjects(bases, planting)])


class _Planner:
    """Plans a target that a manifest declares."""

    def __init__(self, target: Target, manifest: Manifest, modules: Modules, options: Options) -> None:
        self.target = target
        self.manifest = manifest
        self.module, self.original = modules
        self.options = options
        self.resolved: dict[str, Any] = {}
        self.configurations = self._configurations()

    def family(self) -> Plan:
        """Every variant: tiny, its further RoPE kinds, published configurations; claimed undecided come last."""
        plan = Plan()
        for variant in sorted(self.manifest.variants, key=self._is_undecided):
            self._variant(plan, variant)
        return plan

    def given(self) -> Plan:
        """Only the given configuration; the tiny ones that it rests on lend their numeric checks."""
        plan = Plan()
        name, config = self.target.config_name or "given", dict(self.target.config or {})
        arguments = self._arguments(config)
        variant = self.manifest.variant_for(arguments)
        if variant is None:
            raise TargetError(
                "no variant of the manifest covers this configuration",
                where=name,
                allowed=", ".join(self.manifest.variants),
                fix=f"add a variant to {self.manifest.path.name}",
            )
        kind = rope_kind(arguments)
        own = self._entry(variant, name, config, self._tiny(variant, kind), kind, _OWN_TIERS)
        plan.entries.append(own)
        main = self._kinds(variant)[0]
        for lent in dict.fromkeys([kind, main]):
            entry = self._tiny_entry(variant, lent, ("numeric",))
            entry.planned.reported, entry.after = False, 0
            if entry.checks:
                own.planned.borrows.append(len(plan.entries))
                plan.entries.append(entry)
        return plan

    def _variant(self, plan: Plan, variant: str) -> None:
        """Add a variant's subjects; RoPE kinds claimed undecided come last, so that they can't spoil the rest."""
        published = [(rope_kind(item[2]), *item) for item in self._published(plan, variant)]
        kinds = list(dict.fromkeys([*self._kinds(variant), *(item[0] for item in published)]))
        undecided = [kind for kind in kinds[1:] if self.manifest.rope_claim(kind) == "undecided"]
        at: dict[str, int] = {}
        for group in ([kind for kind in kinds if kind not in undecided], undecided):
            for kind in group:
                at[kind] = len(plan.entries)
                plan.entries.append(self._tiny_entry(variant, kind, TIERS))
            for kind, name, config, _ in published:
                if kind in group:
                    entry = self._entry(variant, name, config, self._tiny(variant, kind), kind, _OWN_TIERS)
                    entry.planned.published = True
                    entry.planned.borrows = list(dict.fromkeys([at[kind], at[kinds[0]]]))
                    plan.entries.append(entry)

    def _kinds(self, variant: str) -> list[str]:
        """The RoPE kinds of a variant, the main one first."""
        declared = [item.kind for item in self.manifest.rope]
        own = rope_kind(self._arguments(self.manifest.variants[variant].tiny))
        main = self.manifest.rope_kinds[0] if self.manifest.rope_kinds else own
        return list(dict.fromkeys([main, *declared]))

    def _tiny(self, variant: str, kind: str) -> dict[str, Any]:
        tiny = dict(self.manifest.variants[variant].tiny)
        return tiny if rope_kind(self._arguments(tiny)) == kind else with_rope(tiny, kind)

    def _tiny_entry(self, variant: str, kind: str, tiers: Iterable[Tier]) -> Entry:
        main = self._kinds(variant)[0]
        tiny = self._tiny(variant, kind)
        return self._entry(variant, tiny_name(kind, main), tiny, tiny, kind, tiers, main=kind == main)

    def _entry(
        self,
        variant: str,
        name: str,
        config: dict[str, Any],
        tiny: dict[str, Any],
        kind: str,
        tiers: Iterable[Tier],
        *,
        main: bool = True,
    ) -> Entry:
        arguments = self._arguments(config)
        declared = self.manifest.variants[variant]
        subject = Subject(
            self.manifest.family,
            variant,
            name,
            self.module,
            config,
            tiny,
            expected=self.manifest.cache_specs(arguments),
            reachable=self._reachable(variant, name, arguments),
            exercised={spec.rule for spec in self.manifest.layer_specs(self._arguments(tiny))},
            exactness=declared.exactness,
            rope=kind,
            main=main,
            decodes=declared.claims.compiled_decode in _POSITIVE,
            checkpoint=self.target.folder if name == self.target.config_name else None,
            original=self.original,
            overlay=self.target.overlay,
            **_amounts(self.options),
        )
        planned = PlannedSubject(
            variant=variant,
            configuration=name,
            claimed=self._claimed(variant, kind),
            restore=self._claimed(variant, kind, RESTORE),
            limits=declared.limits,
        )
        return _entry(planned, subject, tiers, self.options)

    def _claimed(self, variant: str, kind: str, of: str = DECODE) -> VerdictName | None:
        """A RoPE kind narrows the variant's claim: undecided where it is so claimed, none where it is not named."""
        claim = self.manifest.rope_claim(kind)
        if claim == "undecided":
            return "undecided"
        if claim is None and self.manifest.rope:
            return None
        claims = self.manifest.variants[variant].claims
        return claims.compiled_decode if of == DECODE else claims.prefix_restore

    def _is_undecided(self, variant: str) -> bool:
        return self.manifest.variants[variant].claims.compiled_decode == "undecided"

    def _reachable(self, variant: str, name: str, arguments: Any) -> dict[int, str]:
        found = {spec.rule: name for spec in self.manifest.layer_specs(arguments)}
        for published, (_, theirs) in self.configurations.items():
            if self.manifest.variant_for(theirs) == variant:
                for spec in self.manifest.layer_specs(theirs):
                    found.setdefault(spec.rule, published)
        return found

    def _configurations(self) -> dict[str, tuple[dict[str, Any], Any]]:
        """The published configurations by name, with their resolved arguments."""
        found = {}
        for name in self.manifest.configurations:
            config = load_configuration(self.manifest.configuration_path(name))
            found[name] = (config, self._arguments(config))
        return found

    def _arguments(self, config: Mapping[str, Any]) -> Any:
        """Return what the manifest's expressions speak of; each configuration is resolved once."""
        key = repr(config)
        if key not in self.resolved:
            self.resolved[key] = declared_arguments(self.module, config, self.manifest.arguments)
        return self.resolved[key]

    def _published(self, plan: Plan, variant: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Yield the published configurations to trace; note those left out in the plan."""
        chosen: list[tuple[str, Any]] = []
        most = PROFILES[self.options.profile].configurations  # type: ignore[index]
        for name, (config, arguments) in self.configurations.items():
            if self.manifest.variant_for(arguments) != variant:
                continue
            form = (vars(arguments), config.get("quantization"), config.get("torch_dtype"))
            same = next((other for other, seen in chosen if seen == form), None)
            if same is not None:
                plan.skipped.append(f"{name}: same arguments as {same}")
            elif len(chosen) == most:
                plan.skipped.append(f"{name}: profile {self.options.profile} takes {most} a variant")
            else:
                chosen.append((name, form))
                yield name, config, arguments


def _without_manifest(target: Target, modules: Modules, options: Options) -> Plan:
    """One subject: the given configuration, and its shrunk form for the numeric tier."""
    config, name = dict(target.config or {}), target.config_name or "given"
    module, original = modules
    subject = Subject(
        target.family,
        "default",
        name,
        module,
        config,
        tiny_of(module, config),
        exactness="",
        rope=rope_kind(resolve_arguments(module, config)),
        checkpoint=target.folder,
        original=original,
        overlay=target.overlay,
        **_amounts(options),
    )
    return Plan([_entry(PlannedSubject(variant="default", configuration=name), subject, TIERS, options)])


def _blocked(target: Target, options: Options, reason: str) -> Plan:
    """What would be audited, of which nothing can be run; only the source is read."""
    left_out = target.manifest.configurations if target.manifest is not None else []
    plan = Plan(skipped=[f"{name}: {reason}" for name in left_out])
    for planned in _names(target):
        entry = _entry(planned, None, TIERS, options)
        entry.blocked, entry.source = reason, _source(target)
        plan.entries.append(entry)
    return plan


def _names(target: Target) -> list[PlannedSubject]:
    manifest = target.manifest
    if manifest is None or target.config is not None:
        return [PlannedSubject(variant="default", configuration=target.config_name or "given")]
    return [
        PlannedSubject(
            variant=name,
            configuration="tiny",
            claimed=variant.claims.compiled_decode,
            restore=variant.claims.prefix_restore,
            limits=variant.limits,
        )
        for name, variant in manifest.variants.items()
    ]


def _source(target: Target) -> Source:
    """The file that a target's model is made of, which need not be importable."""
    file = target.overlay.get(target.module or "") or target.file or module_file(Path(), target.module or "")
    return Source(file or Path(), target.overlay)


def _entry(
    planned: PlannedSubject, subject: Subject | None, tiers: Iterable[Tier], options: Options
) -> Entry:
    wanted = set(tiers)
    if subject is None or subject.checkpoint is None:
        wanted.discard("checkpoint")
    checks = [c for c in all_checks() if c.tier in wanted and options.selects(c.code, c.tier)]
    checks = [
        c for c in checks if c.claim == DECODE or _is_claimed(planned.restore) or c.code in options.only
    ]
    planned.checks = [PlannedCheck(code=c.code, name=c.name, tier=c.tier) for c in checks]
    return Entry(planned, subject, checks)


def _is_claimed(claim: VerdictName | None) -> bool:
    """Return whether anything is claimed: only then are the checks of a further claim run unasked."""
    return claim not in (None, "undecided")


def _modules(target: Target) -> Modules:
    place: str | Path | None = target.file or target.module
    assert place is not None, "a target has a module or a file"
    if target.overlay:
        original, patched = import_patched(place, target.overlay)
        return patched, original
    return (import_file(place) if isinstance(place, Path) else import_model(place)), None


def _amounts(options: Options) -> dict[str, Any]:
    return {"profile": options.profile, "dtype": options.dtype, "seed": options.seed}
