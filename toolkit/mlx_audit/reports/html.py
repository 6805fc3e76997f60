"""One self-contained HTML page: the compatibility board, and a section a family. It asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlx_audit import resources
from mlx_audit._version import __version__
from mlx_audit.errors import clean
from mlx_audit.evidence.results import Results, VerdictName
from mlx_audit.reports.documents import known_environment
from mlx_audit.reports.html_board import (
    MOST_NAME,
    STRONGEST_FIRST,
    Block,
    Line,
    lines_of,
    places_and_blocks,
)
from mlx_audit.reports.html_data import Packer, packed_text

_SCRIPTS = ("report_shapes.js", "report_family.js", "report_board.js")
_STYLE = "report.css"
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_ID = 60


class Section(NamedTuple):
    """A family on the page.

    Attributes:
        id: Its name in addresses, distinct, of letters, digits, `_`, `.` and `-`.
        verdicts: How many of the lines that claim something have each verdict; of all, where none does.
    """

    id: str
    name: str
    variants: int
    places: list[str]
    verdicts: list[tuple[VerdictName, int]]
    fails: int
    lines: list[Line]


def render(documents: Sequence[Results]) -> str:
    """Return the page.

    Args:
        documents: One for each backend, matrix job or record; what has the same environment is shown together.
    """
    places, blocks = places_and_blocks(documents)
    families: dict[str, list[tuple[Block, list[Line]]]] = {}
    for block in blocks:
        families.setdefault(block.family, []).append((block, lines_of(block, places)))
    names = _ids(families)
    sections = [_section(names[family], own) for family, own in families.items()]
    data = Packer().pack({names[family]: own for family, own in families.items()}, places)
    style = _text(_STYLE)
    script = '"use strict";\n(() => {\n' + "\n".join(map(_text, _SCRIPTS)) + "})();\n"
    page = _templates().get_template("report.html.j2")
    return page.render(
        sections=sections,
        places=[(place.label, list(known_environment(place.environment))) for place in places],
        version=__version__,
        style=style,
        script=script,
        style_hash=_source_hash(style),
        script_hash=_source_hash(script),
        data=packed_text(data),
        **_board(sections),
    )


def _board(sections: Sequence[Section]) -> dict[str, Any]:
    """Return what the head of the page and the filters say of all lines."""
    lines = [line for section in sections for line in section.lines]
    return {
        "lines": lines,
        "claims_made": sum(line.standing != "claims nothing" for line in lines),
        "verdicts": _counted(lines),
        "backends": sorted({line.backend for line in lines}),
        "claims": sorted({line.claim for line in lines}),
        "failing": [(own, line) for own in sections for line in own.lines if line.standing == "fails"],
        "open": sum(line.standing == "undecided" for line in lines),
        "in_part": sum(line.standing == "in part" for line in lines),
        "exceptions": _exceptions(sections),
        "capable": sum({name for name, _ in section.verdicts} == {"capable"} for section in sections),
    }


def _section(name: str, own: Sequence[tuple[Block, list[Line]]]) -> Section:
    lines = [line for _, found in own for line in found]
    binding = [line for line in lines if line.standing != "claims nothing"] or lines
    return Section(
        id=name,
        name=clean(own[0][0].family, MOST_NAME),
        variants=len({block.variant for block, _ in own}),
        places=list(dict.fromkeys(line.label for line in lines)),
        verdicts=[(verdict, count) for verdict, count in _counted(binding) if count],
        fails=sum(line.standing == "fails" for line in lines),
        lines=lines,
    )


def _counted(lines: Sequence[Line]) -> list[tuple[VerdictName, int]]:
    return [(name, sum(line.verdict == name for line in lines)) for name in STRONGEST_FIRST]


def _exceptions(sections: Sequence[Section]) -> list[tuple[VerdictName, list[Section]]]:
    """Return the families that are not capable throughout, by each other verdict that they have, the weakest first."""
    found = [
        (name, [section for section in sections if name in dict(section.verdicts)])
        for name in reversed(STRONGEST_FIRST)
        if name != "capable"
    ]
    return [(name, own) for name, own in found if own]


def _ids(families: Iterable[str]) -> dict[str, str]:
    """Return a name for addresses for each family; those that come out equal are numbered."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for family in families:
        base = _UNFIT.sub("-", family)[:_LONGEST_ID].strip("-") or "family"
        numbered = (f"{base}-{number}" for number in count(2))
        name = next(name for name in chain([base], numbered) if name not in taken)
        taken.add(name)
        found[family] = name
    return found


def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(resources.templates()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _text(name: str) -> str:
    return (resources.templates() / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    """Return how a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
