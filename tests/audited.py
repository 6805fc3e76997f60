"""Subjects for tests of the checks: healthy ones, shared, and faulty ones from mutated copies of mlx-lm's llama."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_audit.checks.base import Check, all_checks, execute
from mlx_audit.checks.subject import Subject
from mlx_audit.evidence.results import CheckResult
from mlx_audit.manifests import CacheSpec
from mlx_audit.models.modules import import_file
from tiny_models import config_of, module_of

_names = itertools.count()


def new_subject(
    family: str = "llama",
    module: ModuleType | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Subject:
    """Return a subject whose only configuration is a tiny one, with the topology that a manifest would declare."""
    own = dict(config) if config is not None else config_of(family)
    options.setdefault("expected", [CacheSpec("linear")] * own["num_hidden_layers"])
    return Subject(family, "full", "tiny", module or module_of(family), own, own, **options)


@functools.cache
def healthy(family: str = "llama") -> Subject:
    """Return one healthy subject for all tests that plant nothing; its models and traces are made once."""
    return new_subject(family)


def check(code: str) -> Check:
    """Return a check by its code."""
    return next(found for found in all_checks() if found.code == code)


def only(code: str, subject: Subject) -> CheckResult:
    """Execute one check alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a session warns of a trace a token; here it must become a result
        return execute(check(code), subject, {})


def red(code: str, subject: Subject) -> CheckResult:
    """Execute one check alone, which must fail, with a reason."""
    result = only(code, subject)
    assert result.status == "fail", (result.status, result.reason, result.figures)
    assert result.reason
    return result


def green(code: str, subject: Subject) -> CheckResult:
    """Execute one check alone, which must pass."""
    result = only(code, subject)
    assert result.status == "pass", (result.status, result.reason)
    return result


def all_results(subject: Subject) -> dict[str, CheckResult]:
    """Execute every check, as an audit does."""
    done: dict[str, CheckResult] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in all_checks():
            done[found.code] = execute(found, subject, done)
    return done


def statuses(results: Mapping[str, CheckResult], status: str) -> list[str]:
    """Return the codes of the results that have a status."""
    return [code for code, result in results.items() if result.status == status]


def mutated(folder: Path, *changes: tuple[str, str], name: str = "copy") -> ModuleType:
    """Return mlx-lm's llama with pieces of its source replaced; each piece must be there."""
    source = Path(module_of("llama").__file__ or "").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in source, f"mlx-lm's llama has no {old!r} any more"
        source = source.replace(old, new)
    path = folder / f"{name}_{next(_names)}.py"
    path.write_text(source, encoding="utf-8")
    return import_file(path)


def line_of(module: ModuleType, text: str) -> int:
    """Return the number of the first line of a module's source that holds a text."""
    lines = Path(module.__file__ or "").read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)
