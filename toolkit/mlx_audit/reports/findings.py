"""Findings that have a place in a file, each once, whatever number of configurations has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from mlx_audit.errors import clean
from mlx_audit.evidence.codes import claims_on
from mlx_audit.evidence.results import CheckResult, Result
from mlx_audit.reports.documents import claims_of, standing_of, worst

Level = Literal["error", "warning", "note"]

_PLACE = r"(?P<path>[^\n]{1,400}?\.py):(?P<line>[1-9]\d{0,8})(?::(?P<column>[1-9]\d{0,8}))?"
_WHERE = re.compile(_PLACE)
_TEXT = re.compile(rf"{_PLACE}[: ]\s*(?P<rest>.*)", re.DOTALL)
_LEVELS: tuple[Level, ...] = ("error", "warning", "note")
_MOST_AFFECTED = 20
PACKAGE = "mlx_lm"


@dataclass(frozen=True)
class Place:
    """Where a finding is.

    Attributes:
        path: Relative to `base`, with `/`; never absolute, and never outside of it.
        base: `SITE_PACKAGES` for mlx-lm's own files, else `WORKING_DIRECTORY`.
        line: From 1 on.
        column: From 1 on; None where it is not known.
    """

    path: str
    base: str
    line: int
    column: int | None


@dataclass
class Finding:
    """What one check found at one place.

    Attributes:
        what: One sentence.
        when: The condition under which the place is reached; empty if always.
        affected: The configurations that have it, by family and variant.
    """

    code: str
    place: Place
    level: Level
    what: str
    when: str = ""
    affected: dict[str, list[str]] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """All of it in one paragraph."""
        names = [_counted(variant, configurations) for variant, configurations in self.affected.items()]
        more = f" and {len(names) - _MOST_AFFECTED:,} more" if len(names) > _MOST_AFFECTED else ""
        affected = ", ".join(names[:_MOST_AFFECTED]) + more
        text = f"{self.what}. Found in {affected}."
        if self.level == "warning":
            when = self.when or "a configuration reaches it"
            text = f"{self.what}, when {when}. None that was audited does: {affected}."
        return text.replace("](", "] (")  # in a message this is a link


def _counted(variant: str, configurations: list[str]) -> str:
    more = f" and {len(configurations) - 1:,} more" if len(configurations) > 1 else ""
    return f"{variant} ({configurations[0]}{more})"


def findings_of(results: Iterable[Result]) -> tuple[list[Finding], int]:
    """Return the findings in the order of their places, and how many failed checks have no place in a file."""
    found: dict[tuple[str, Place], Finding] = {}
    unplaced = 0
    for result in results:
        for check in result.checks:
            own = [*_failed(result, check), *_conditional(result, check)]
            unplaced += check.status == "fail" and not any(finding.level != "warning" for finding in own)
            for finding in own:
                _merge(found, finding)
    return sorted(found.values(), key=_order), unplaced


def code_of_rule(check: CheckResult) -> str:
    """Return a check's code as an identifier that is never empty."""
    return clean(check.code, 20) or "unknown"


def _merge(found: dict[tuple[str, Place], Finding], finding: Finding) -> None:
    key = (finding.code, finding.place)
    first = found.get(key)
    if first is None or _LEVELS.index(finding.level) < _LEVELS.index(first.level):
        found[key] = finding
    elif finding.level == first.level:
        for variant, configurations in finding.affected.items():
            known = first.affected.setdefault(variant, [])
            known += [name for name in configurations if name not in known]


def _order(finding: Finding) -> tuple[object, ...]:
    place = finding.place
    return place.base, place.path, place.line, place.column or 0, finding.code


def _failed(result: Result, check: CheckResult) -> Iterator[Finding]:
    """Yield the places of a failed check: the one that it names, and more of the same hazard."""
    if check.status != "fail":
        return
    claims = claims_of(result)
    bound = [name for name in claims if name in claims_on(check.code)] or list(claims)
    standing = worst(standing_of(result, claims[name], name) for name in bound)
    level: Level = "error" if standing in ("fails", "undecided") else "note"
    first = _WHERE.fullmatch(check.where or "")
    stated = _TEXT.match(check.reason)
    what = stated["rest"] if stated is not None else check.reason
    if (match := first or stated) is not None:
        yield _finding(result, check, match, what, level)
    for text in _texts(check.figures.get("more_places")):
        if (match := _TEXT.match(text)) is not None:
            yield _finding(result, check, match, _without_kind(match["rest"]), level)


def _conditional(result: Result, check: CheckResult) -> Iterator[Finding]:
    """Yield what no audited configuration reaches, but others do."""
    items = check.figures.get("conditional")
    for item in items if isinstance(items, list) else ():
        text = item.get("what") if isinstance(item, dict) else None
        match = _TEXT.match(text) if isinstance(text, str) else None
        if match is not None:
            finding = _finding(result, check, match, _without_kind(match["rest"]), "warning")
            finding.when = clean(item.get("when", ""), 300)
            yield finding


def _finding(result: Result, check: CheckResult, match: re.Match[str], what: str, level: Level) -> Finding:
    path, base = _relative(clean(match["path"]), clean(result.target))
    place = Place(path, base, int(match["line"]), int(match["column"]) if match["column"] else None)
    affected = {clean(f"{result.family} {result.variant}", 200): [clean(result.configuration, 200)]}
    return Finding(code_of_rule(check), place, level, clean(what, 1_000).rstrip("."), affected=affected)


def _without_kind(text: str) -> str:
    """Return what is said after the short name of a mechanism: `arange bound: …`."""
    return text.partition(": ")[2] or text


def _relative(text: str, target: str) -> tuple[str, str]:
    """Return a path relative to its base, and the base.

    A user's own file is known by its name alone; where it is the target, the target says in which folder it is.
    """
    path = _below(text)
    if path.parts[0] == PACKAGE:
        return str(path), "SITE_PACKAGES"
    known = _below(target) if target.endswith(".py") else path
    return str(known if len(path.parts) == 1 and known.name == path.name else path), "WORKING_DIRECTORY"


def _below(text: str) -> PurePosixPath:
    """Return a path with nothing absolute in it: below site-packages, below the working directory, or a name."""
    windows = PureWindowsPath(text)
    path = PurePosixPath(windows.as_posix()) if windows.drive else PurePosixPath(text)
    if "site-packages" in path.parts[:-1]:
        path = PurePosixPath(*path.parts[path.parts.index("site-packages") + 1 :])
    elif path.is_absolute() and path.is_relative_to(Path.cwd().as_posix()):
        path = path.relative_to(Path.cwd().as_posix())
    outside = path.is_absolute() or ".." in path.parts or windows.drive
    return PurePosixPath(path.name or "unknown") if outside else path


def _texts(value: object) -> Iterator[str]:
    for item in value if isinstance(value, list) else ():
        if isinstance(item, str):
            yield item
