"""The section and the tag in a model card (`README.md`): edited as text, so that all the rest stays as it is."""

from __future__ import annotations

import html
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlx_audit import resources
from mlx_audit.errors import clean
from mlx_audit.evidence.atomic import write_atomically
from mlx_audit.evidence.results import Status
from mlx_audit.evidence.stamps import Stamp
from mlx_audit.manifests.files import read_bounded

FILE = "README.md"
TAG = "mlx-audit"
BEGIN, END = "<!-- mlx-audit: begin -->", "<!-- mlx-audit: end -->"

_MOST_BYTES = 1 << 20
_MOST_FRONT = 64 << 10
_MOST_NESTED = 1_000
_MOST_DEPTH = 20
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$^:@-])")
_WORDS: dict[Status, str] = {
    "pass": "passed",
    "fail": "failed",
    "not-run": "not run",
    "not-applicable": "not applicable",
}


def write_card(stamp: Stamp, folder: Path) -> list[str]:
    """Write the section and the tag into a folder's model card, and return what could not be done.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / FILE
    data = b""
    if path.exists():
        data = read_bounded(path, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            return [f"{FILE} was left as it is: more than {_MOST_BYTES} bytes"]
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return [f"{FILE} was left as it is: no UTF-8"]
    text, remarks = edited(text, section(stamp))
    if text.encode() != data or not data:
        write_atomically(path, text)
    return remarks


def section(stamp: Stamp) -> str:
    """Return the section, between its marks, ending in a line break; what it says of foreign things is escaped."""
    counts = Counter(check.status for check in stamp.checks)
    real = [check for check in stamp.checks if check.tier == "checkpoint"]
    templates = Environment(
        loader=FileSystemLoader(resources.templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Markdown: each value is escaped here
    )
    return templates.get_template("model_card.md.j2").render(
        family=escaped(stamp.family),
        variant=escaped(stamp.variant),
        backend=escaped(stamp.backend),
        mlx=escaped(stamp.mlx),
        verdict=escaped(stamp.verdict),
        reason=escaped(stamp.reason),
        limits=[escaped(limit) for limit in stamp.limits],
        counts=", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status])
        or "none",
        real=", ".join(f"{check.code} {_WORDS[check.status]}" for check in real) or "nothing was checked",
        check_again=stamp.check_again,
    )


def escaped(value: str) -> str:
    """Return a text that Markdown and HTML show as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", html.escape(clean(value)))


def edited(text: str, own: str) -> tuple[str, list[str]]:
    """Return a model card with the section and the tag, and what could not be done.

    Args:
        text: The card as it is; empty where there is none.
        own: The section, between its marks.
    """
    remarks = []
    newline = "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"
    own = own.replace("\n", newline)
    lines = _LINE.findall(text)
    begins = [at for at, line in enumerate(lines) if line.strip() == BEGIN]
    ends = [at for at, line in enumerate(lines) if line.strip() == END]
    if not begins and not ends:
        if text and not text.endswith("\n"):
            text += newline
        text += (newline if text.strip() else "") + own
    elif len(begins) == len(ends) == 1 and begins[0] < ends[0]:
        text = "".join([*lines[: begins[0]], own, *lines[ends[0] + 1 :]])
    else:
        remarks.append(f"{FILE} got no section: its marks of mlx-audit's section are not one pair")
    tagged = _tagged(text, newline)
    if tagged is None:
        remarks.append(f"{FILE} got no tag {TAG}: its front matter is none that can be added to safely")
    return tagged if tagged is not None else text, remarks


def _tagged(text: str, newline: str) -> str | None:
    """Return the card with the tag in its front matter; None where it cannot be added without touching the rest."""
    lines = _LINE.findall(text)
    if not lines or lines[0].rstrip() != "---":
        return f"---{newline}tags:{newline}- {TAG}{newline}---{newline}{newline}{text}"
    close = next((at for at, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"), None)
    if close is None:
        return None
    front = lines[1:close]
    before = _parsed(front)
    if before is None:
        return None
    tags = before.get("tags")
    if isinstance(tags, list) and TAG in tags:
        return text
    if tags is not None and not isinstance(tags, list):
        return None
    added = _with_tag(front, newline, listed=isinstance(tags, list), stated="tags" in before)
    # Whatever the text looks like: it must now say the same as before, and the tag.
    if added is None or _parsed(added) != {**before, "tags": [*(tags or []), TAG]}:
        return None
    return "".join([lines[0], *added, *lines[close:]])


def _with_tag(front: list[str], newline: str, *, listed: bool, stated: bool) -> list[str] | None:
    if not stated:
        return [*front, f"tags:{newline}- {TAG}{newline}"]
    at = next((at for at, line in enumerate(front) if re.match(r"tags\s*:", line)), None)
    if at is None:
        return None
    line = front[at].rstrip()
    if line.endswith("]"):
        comma = "" if re.search(r"\[\s*\]$", line) else ", "
        return [*front[:at], f"{line[:-1].rstrip()}{comma}{TAG}]{newline}", *front[at + 1 :]]
    if not re.fullmatch(r"tags\s*:", line):
        return None
    last, indent = at, ""
    for next_at in range(at + 1, len(front)):
        item = re.match(r"(\s*)- ", front[next_at])
        if item is None:
            break
        last, indent = next_at, item[1]
    if listed and last == at:
        return None
    return [*front[: last + 1], f"{indent}- {TAG}{newline}", *front[last + 1 :]]


def _parsed(front: list[str]) -> dict[str, Any] | None:
    """Return what a front matter says; None where it is no mapping, too large, or too deep, or uses anchors,
    which can explode."""
    text = "".join(front)
    if len(text) > _MOST_FRONT or text.count("[") + text.count("{") > _MOST_NESTED:
        return None
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _MOST_DEPTH:
                return None
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    if found is None:
        return {}
    return found if isinstance(found, dict) else None
