"""What no audit would have written into a record, though the record has the form of its schema and a fitting digest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from mlx_audit.evidence.record_schema import Record, RecordedVariant

Fault = tuple[str, object, object]
"""What is wrong, what was found, and what is allowed."""

PROFILES = ("quick", "ci", "nightly")
"""Names of `mlx_audit.checks.profiles`, which imports MLX."""

_SEEDS = range(2**64)
_FILE = re.compile(r"(?:\./|(?:[A-Za-z0-9_-]+/)*)[A-Za-z0-9_.-]+\.py")
_CONDITION = ("needs", "what", "when")


def unsound(record: Record) -> Iterator[Fault]:
    """Yield what is wrong with a record, the first first."""
    for name, variant in record.variants.items():
        yield from _variant(name, variant)
    if bool(record.adapter) != ("adapter" in record.digests):
        yield "the class of an adapter and its digest belong together", record.adapter or None, "both or none"
    for part, files in record.files.items():
        if part not in record.digests:
            yield "files of a digest that is not there", part, ", ".join(record.digests)
        if strange := [file for file in files if not _FILE.fullmatch(file) or ".." in file.split("/")]:
            yield (
                f"a digest `{part}` of what is no file of a package",
                strange[0],
                "package/file.py, ./file.py",
            )


def _variant(name: str, variant: RecordedVariant) -> Iterator[Fault]:
    if variant.profile not in PROFILES:
        yield f"{name} was audited by an unknown profile", variant.profile, ", ".join(PROFILES)
    if variant.seed not in _SEEDS:
        yield f"{name} was audited with an impossible seed", variant.seed, f"0 to {_SEEDS[-1]}"
    if twice := _twice(result.configuration for result in variant.results):
        yield f"{name} has a configuration twice", twice, "once"
    for result in variant.results:
        for check in result.checks:
            where = f"{name} {result.configuration} {check.code}"
            if check.where is not None or check.reproduce is not None:
                yield f"{where} has a place or a command", check.where or check.reproduce, "neither: no paths"
            conditional = check.figures.get("conditional", [])
            if not isinstance(conditional, list) or not all(map(_is_condition, conditional)):
                yield f"{where}: `conditional` is no list of conditions", conditional, ", ".join(_CONDITION)


def _twice(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def _is_condition(item: Any) -> bool:
    """Whether sessions can read a condition: one that they cannot would silently allow what it forbids."""
    if not isinstance(item, dict) or sorted(item) != sorted(_CONDITION):
        return False
    needs = item["needs"]
    texts = [item["what"], item["when"], *(needs if isinstance(needs, list) else [None])]
    return all(isinstance(text, str) for text in texts)
