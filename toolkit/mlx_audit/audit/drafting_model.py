"""From a target and its configuration to the draft of a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn

from mlx_audit.audit.drafting_measured import exactness
from mlx_audit.audit.drafting_source import hazards, places, positions
from mlx_audit.audit.drafting_topology import Found, find_topology
from mlx_audit.audit.inspected import Inspection
from mlx_audit.audit.request import Request
from mlx_audit.errors import EnvironmentUnfit, MlxAuditError, TargetError, describe
from mlx_audit.evidence.conditions import is_met
from mlx_audit.manifests import CacheSpec
from mlx_audit.manifests.drafting import Draft
from mlx_audit.manifests.evaluation import names_of
from mlx_audit.manifests.modules import argument_names
from mlx_audit.manifests.observations import Unexplained
from mlx_audit.manifests.rules import Rules
from mlx_audit.manifests.schema import ROPE_KINDS
from mlx_audit.models.build import build_lazy, resolve_arguments
from mlx_audit.models.fitting import Fitted, fitted_tiny, try_out
from mlx_audit.models.live import entry_name, leaves, unknown_classes
from mlx_audit.models.modules import import_file, import_model
from mlx_audit.models.observed import Observed, argument_objects, observe
from mlx_audit.models.rope import rope_kind
from mlx_audit.source import Consumer, SourceReport, read_source
from mlx_audit.tracing.tracer import source_line

_NO_BACKEND = "No Metal back-end"


class CannotBeStated(TargetError):
    """A manifest has no words for what the model does."""

    exit_code = 4


def draft_request(request: Request) -> Draft:
    """Return the draft of a target.

    Raises:
        CannotBeStated: a manifest has no words for the model's caches.
        TargetError: the model cannot be built from its configuration.
    """
    target = request.target()
    module = import_file(target.file) if target.file is not None else import_model(target.module or "")
    config, name = dict(target.config or {}), target.config_name or "given"
    arguments = resolve_arguments(module, config)
    real = observe(build_lazy(module, arguments))
    _require_known(real)
    tiny = _tiny(module, config, real)
    found = _topology(module, config, real, tiny)
    file = Path(module.__file__ or "")
    declared = f"./{file.name}" if target.file is not None else module.__name__
    tiny = _pruned(module, tiny, found, file.parent, declared)
    measured, how = exactness(module, tiny.config, target.family)
    rope, unnamed = _rope(real.model, arguments)
    report = read_source(file)
    notes = _notes(found.rules, report)
    notes["exactness"] = [how, *_lacking(tiny, name)]
    notes["rope"] = [*unnamed, *notes["rope"]]
    return Draft(
        family=re.sub(r"[^A-Za-z0-9_-]", "_", target.family)[:64],
        module=declared,
        about=_about(real, name),
        sources=places(module, real.model, argument_objects(real.model, arguments)[found.arguments]),
        arguments=found.arguments,
        count=found.rules.count,
        layers=found.rules.layers,
        before=found.rules.before,
        rope=rope,
        variant=_variant(real.entries),
        exactness=measured,
        tiny=tiny.config,
        requires={"mlx-lm": f">={version('mlx-lm')}"},
        notes={key: texts for key, texts in notes.items() if texts},
        hazardous=any(_met(item, real.model) for item in report.hazards),
    )


def _met(hazard: Consumer, model: nn.Module) -> bool:
    return not (hazard.when or hazard.needs) or is_met(model, hazard.needs, hazard.when)


def _topology(module: ModuleType, config: Mapping[str, Any], real: Observed, tiny: Fitted) -> Found:
    try:
        return find_topology(module, config, real, tiny)
    except Unexplained as error:
        raise CannotBeStated(
            error.what, where=module.__name__, found=error.found, fix="write the manifest by hand"
        ) from error


def _notes(rules: Rules, report: SourceReport) -> dict[str, list[str]]:
    """Return the remarks, by the key above which they stand."""
    return {
        "sources": positions(report),
        "layers": list(rules.notes.values()),
        "rope": hazards(report, of_rope=True),
        "claims": hazards(report, of_rope=False),
    }


def _lacking(tiny: Fitted, name: str) -> list[str]:
    if not tiny.lacking:
        return []
    forms = "; ".join(sorted(form[0] for form in tiny.lacking))
    return [f"tiny lacks some of the forms of layers that {name} has: {forms}"]


def _require_known(real: Observed) -> None:
    if not real.entries:
        raise CannotBeStated("the model makes no caches", fix="nothing can be audited without one")
    for index, spec in enumerate(real.entries):
        for place, name in unknown_classes(spec, entry_name(real.model, index, len(real.entries))):
            raise CannotBeStated(
                "a cache of a class that no kind of a manifest stands for",
                where=place,
                found=name,
                allowed="the cache classes of mlx-lm",
                fix="give the model a new_fixed_capacity_cache of its own, and write the manifest by hand",
            )


def _tiny(module: ModuleType, config: Mapping[str, Any], real: Observed) -> Fitted:
    try:
        return fitted_tiny(module, config, real)
    except TargetError as error:
        if _NO_BACKEND in str(error):
            raise EnvironmentUnfit(
                "the model runs on Metal only", where=module.__name__, fix="draft it on a Mac"
            ) from error
        cause = error.__cause__
        if isinstance(cause, Exception) and not isinstance(cause, MlxAuditError):
            error = TargetError(error.what, where=source_line(cause), found=describe(cause), fix=error.fix)
        raise error from cause


def _pruned(module: ModuleType, tiny: Fitted, found: Found, folder: Path, declared: str) -> Fitted:
    """Leave out what the model never looks at, as long as its arguments and caches stay the same."""
    known = argument_names(folder, declared) or frozenset()
    objects = argument_objects(tiny.observed.model, tiny.arguments)
    for config in _leaner(tiny.config, known):
        try:
            observed, arguments = try_out(module, config)
        except Exception:
            continue
        its = argument_objects(observed.model, arguments).get(found.arguments)
        same = repr(names_of(its)) == repr(names_of(objects[found.arguments]))
        if same and observed.entries == tiny.observed.entries:
            return Fitted(config, observed, arguments, tiny.lacking)
    return tiny


def _leaner(config: Mapping[str, Any], known: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield the keys that are known, in the text part too, or at the top only; or the text part in place of all."""
    yield _known_keys(config, known, nested=True)
    yield _known_keys(config, known, nested=False)
    if isinstance(text := config.get("text_config"), Mapping):
        yield _known_keys({**config, **text}, known, nested=False)


def _known_keys(config: Mapping[str, Any], known: frozenset[str], *, nested: bool) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key in known}
    first = {"model_type": config["model_type"]} if "model_type" in config else {}
    if nested and isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = _known_keys(text, known, nested=False)
    return {**first, **kept}


def _about(real: Observed, name: str) -> str:
    shown = Inspection(
        "",
        "",
        "",
        "",
        None,
        [spec.kind if not spec.of else spec.label() for spec in real.layers or real.entries],
    )
    return f"{shown.pattern()} in {name}; say here in one sentence what sets the family apart."


def _rope(model: nn.Module, arguments: Any) -> tuple[list[str], list[str]]:
    """Return the kind of rotary embedding, if there is a module for one; and a remark where no manifest names it."""
    names = {type(item).__name__.lower() for item in model.modules()}
    if not any("rope" in name or "rotary" in name for name in names):
        return [], []
    kind = rope_kind(arguments)
    if kind in ROPE_KINDS:
        return [kind], []
    return [], [f"the configuration asks for the RoPE kind {kind}, which a manifest has no word for"]


def _variant(entries: Sequence[CacheSpec]) -> str:
    """Return a name for what the caches are."""
    kinds = {part.kind for spec in entries for part in leaves(spec)}
    if kinds == {"arrays"}:
        return "recurrent"
    if "arrays" in kinds:
        return "hybrid"
    if "chunked" in kinds:
        return "chunked"
    return "sliding" if "rotating" in kinds else "full"
