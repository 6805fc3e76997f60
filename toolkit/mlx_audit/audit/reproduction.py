"""A failure as a script of mlx and mlx-lm alone, rendered from `templates/reproduce.py.j2`."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_audit import resources
from mlx_audit.audit.events import Reproduced
from mlx_audit.checks.content import leaves
from mlx_audit.checks.judged import Threshold
from mlx_audit.checks.located import Location
from mlx_audit.checks.scenario import Scenario
from mlx_audit.checks.shrunk import smallest
from mlx_audit.checks.subject import Subject
from mlx_audit.errors import clean, describe
from mlx_audit.evidence.environment import environment
from mlx_audit.evidence.results import CheckResult
from mlx_audit.models.build import WEIGHT_SCALE

_WIDTH = 110


def reproduced(index: int, subject: Subject, failed: Sequence[CheckResult]) -> Reproduced:
    """Return the script of the first failure that a script can show, or why there is none.

    Args:
        index: Of the subject, in the plan.
        subject: What failed.
        failed: Its failures.
    """
    shown = [check for check in failed if check.tier in ("trace", "numeric")]
    if not shown:
        return _refused(index, failed[0], "it is not about decoding with the tiny model")
    try:
        return _smallest(index, subject, shown[0])
    except Exception as error:  # the failure is what counts; an audit never ends here
        return _refused(index, shown[0], f"making it smaller raised {describe(error)}")


def _smallest(index: int, subject: Subject, check: CheckResult) -> Reproduced:
    foreign = _foreign(subject)
    if foreign:
        return _refused(index, check, f"the script has no cache of its own for {', '.join(foreign)}")
    known = check.figures.get("located", {}).get("scenario")
    scenario, location = smallest(subject, Scenario(**known) if known else None)
    script = render(subject, check, scenario, location)
    return Reproduced(subject=index, code=check.code, script=script, meaning=_meaning(check))


def render(subject: Subject, check: CheckResult, scenario: Scenario, location: Location | None) -> str:
    """Return the script that runs a scenario."""
    prompt, forced = scenario.tokens(subject)
    own = scenario.subject(subject)
    file = Path(subject.module.__file__ or "")
    foreign = subject.module.__name__.rpartition(".")[2].startswith("_mlx_audit_")
    found = [f"{check.code} {check.name}", check.reason, f"at {check.where}" if check.where else ""]
    found += [f"the smallest case: {location.text}"] if location is not None else []
    templates = Environment(
        loader=FileSystemLoader(resources.templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template("reproduce.py.j2").render(
        family=clean(subject.family),
        versions=environment(),
        found=[line for text in found if text for line in textwrap.wrap(clean(text), _WIDTH)],
        config=_literal(json.dumps(subject.tiny, indent=4)),
        dtype=scenario.dtype,
        seed=subject.seed,
        prompt=prompt,
        forced=forced,
        chunk=scenario.piece,
        capacity=scenario.room,
        tolerance=Threshold.of(own).relative,
        weight_scale=WEIGHT_SCALE,
        module=repr(subject.module.__name__),
        file=repr(file.name),
        source=_literal(inspect.getsource(subject.module)) if foreign else None,
    )


def _refused(index: int, check: CheckResult, why: str) -> Reproduced:
    return Reproduced(subject=index, code=check.code, meaning=why)


def _meaning(check: CheckResult) -> str:
    """Return what it means if the script shows no difference."""
    if "located" in check.figures:
        return "the failure lies in mlx-audit's caches or session, not in the model's compiled step"
    return f"what {check.code} found is not in the numbers of these steps"


def _foreign(subject: Subject) -> list[str]:
    """Return the classes of the model's caches that the script cannot stand in for."""
    natives: list[Any] = leaves(make_prompt_cache(subject.model))
    known = (KVCache, RotatingKVCache)
    return sorted(
        {type(n).__name__ for n in natives if type(n) not in known and not isinstance(n, ArraysCache)}
    )


def _literal(text: str) -> str:
    """Return a text as a Python literal: over several lines, where it can be read so."""
    plain = "'''" not in text and "\r" not in text and "\0" not in text and not text.endswith(("'", "\\"))
    return f"r'''{text}'''" if plain else repr(text)
