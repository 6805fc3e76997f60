"""YAML made strict: one document of plain mappings, lists and scalars, each with its place in the file.

Refused are duplicate keys, keys that are not strings, anchors and aliases, tags, tabs, control characters, several
documents, deep nesting, and scalars that YAML versions read differently (`on`, `0o17`, `1:30`, `2024-01-01`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlx_audit.manifests.files import read_bounded
from mlx_audit.manifests.problems import ManifestError, Problem, shown

MAX_BYTES = 256 * 1024
"""Size of a manifest."""
MAX_DEPTH = 20
"""Levels of nested mappings and lists."""
MAX_NODES = 5_000
"""Keys and values in all: reading them takes longer than their bytes say."""

MAX_PROBLEMS = 200
"""Problems after which reading a file is given up."""

Location = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\Z")
_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?\Z|[-+]?\.[0-9]+([eE][-+]?[0-9]+)?\Z")
_FORBIDDEN = re.compile(
    "[^\x0a\x0d\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(frozen=True)
class Place:
    """Where a value stands, 1-based; `quote` is the number of characters before the text of a one-line scalar."""

    line: int
    column: int
    quote: int | None = None


@dataclass
class Document:
    """A file's value, with the place of every value and of every key."""

    file: str
    value: object = None
    values: dict[Location, Place] = field(default_factory=dict)
    keys: dict[Location, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    spoilt: set[Place] = field(default_factory=set)
    """Places whose values could not be read as written."""

    def place(self, location: Location, *, key: bool = False) -> Place:
        """The place of a value (or of its key); of its nearest ancestor when the location does not exist."""
        places = self.keys if key else self.values
        while location:
            if location in places:
                return places[location]
            location = location[:-1]
            places = self.values
        return self.values.get((), Place(1, 1))

    def add(
        self,
        location: Location,
        what: str,
        *,
        key: bool = False,
        offset: int | None = None,
        found: str | None = None,
        allowed: str | None = None,
        fix: str | None = None,
    ) -> None:
        """Note a problem; `offset` counts characters into the text of a scalar."""
        place = self.place(location, key=key)
        if place in self.spoilt:
            return  # its form is wrong already
        column = place.column
        if offset is not None and place.quote is not None:
            column += place.quote + offset
        self.problems.append(Problem(self.file, place.line, column, what, found, allowed, fix))
        if len(self.problems) >= MAX_PROBLEMS:
            self.raise_problems()

    def raise_problems(self) -> None:
        """Raise ManifestError when there is any problem."""
        if self.problems:
            raise ManifestError(self.problems)


def read_document(path: Path, file: str) -> Document:
    """Read a YAML file; problems that leave the rest readable are in the document, others raise ManifestError."""
    document = Document(file)
    loader = StrictLoader(_text(path, document), document)
    try:
        node = _compose(loader, document)
    finally:
        loader.dispose()
    document.raise_problems()
    assert node is not None
    document.value = _build(node, (), document)
    return document


def _compose(loader: StrictLoader, document: Document) -> yaml.Node | None:
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        what = " ".join(filter(None, (error.problem, error.context)))
        _add_mark(document, error.problem_mark or error.context_mark, f"not YAML: {what}")
    except yaml.YAMLError as error:
        document.problems.append(Problem(document.file, 1, 1, f"not YAML: {shown(str(error))}"))
    else:
        if node is None:
            document.add((), "the file is empty", allowed="a mapping", fix="see `mlx-audit schema`")
        return node
    return None


class StrictLoader(yaml.SafeLoader):
    """A SafeLoader that composes nodes only, and notes what strict YAML leaves out."""

    def __init__(self, text: str, document: Document):
        super().__init__(text)
        self.document = document
        self.depth = 0
        self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            self._refuse(event, "an alias", f"*{event.anchor}", "write the value again")
            return yaml.ScalarNode(_TAG + "null", "", *_marks(event))
        if event.anchor is not None:
            self._refuse(event, "an anchor", f"&{event.anchor}", "remove it")
            event.anchor = None
        if event.tag is not None:
            self._refuse(event, "a tag", event.tag, "remove it")
            event.tag = None
            if isinstance(event, yaml.ScalarEvent):
                event.implicit = (False, True)
        self.depth += 1
        self.nodes += 1
        if self.depth > MAX_DEPTH or self.nodes > MAX_NODES:
            problem = (
                f"more than {MAX_NODES} values"
                if self.nodes > MAX_NODES
                else f"nested more than {MAX_DEPTH} levels deep"
            )
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def _refuse(self, event: yaml.NodeEvent, what: str, found: str, fix: str) -> None:
        _add_mark(self.document, event.start_mark, f"{what} is not allowed", found=shown(found), fix=fix)


def _marks(event: yaml.Event) -> tuple[Any, Any]:
    return event.start_mark, event.end_mark


def _text(path: Path, document: Document) -> str:
    """The file's text, after everything that can be said about it as bytes and characters."""
    try:
        data = read_bounded(path, MAX_BYTES)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        raise ManifestError([Problem(document.file, 1, 1, what, fix="name an existing YAML file")]) from None
    if len(data) > MAX_BYTES:
        what = "the file is too large"
        raise ManifestError([Problem(document.file, 1, 1, what, allowed=f"at most {MAX_BYTES // 1024} KiB")])
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = _count(data[: error.start].decode("utf-8"))
        found = f"byte {data[error.start]:#04x}"
        raise ManifestError(
            [Problem(document.file, line, column, "not UTF-8", found, "a text file in UTF-8")]
        ) from None
    problems = []
    for match in _FORBIDDEN.finditer(text):
        name = "a tab" if match.group() == "\t" else "a control character"
        fix = "indent with spaces" if match.group() == "\t" else "remove it"
        problems.append(
            Problem(
                document.file,
                *_count(text[: match.start()]),
                f"{name} is not allowed",
                ascii(match.group()),
                fix=fix,
            )
        )
        if len(problems) == 20:
            break
    if problems:
        raise ManifestError(problems)
    return text


def _count(before: str) -> tuple[int, int]:
    lines = re.split(r"\r\n|\n|\r", before)
    return len(lines), len(lines[-1]) + 1


def _add_mark(document: Document, mark: Any, what: str, **details: str | None) -> None:
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    document.problems.append(Problem(document.file, line, column, what, **details))
    if len(document.problems) >= MAX_PROBLEMS:
        document.raise_problems()


def _build(node: yaml.Node, location: Location, document: Document) -> object:
    """The Python value of a node; its place and its children's are noted on the way."""
    document.values[location] = _place(node)
    if isinstance(node, yaml.MappingNode):
        return {
            key: _build(value, (*location, key), document) for key, value in _pairs(node, location, document)
        }
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*location, at), document) for at, item in enumerate(node.value)]
    return _scalar(node, document)


def _pairs(node: yaml.MappingNode, location: Location, document: Document) -> Iterator[tuple[str, yaml.Node]]:
    seen: dict[str, Place] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
            found = shown(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            _add_mark(
                document,
                key.start_mark,
                "the key is not a string",
                found=found,
                fix="quote it, or correct it",
            )
            continue
        if key.value in seen:
            first = f"first at line {seen[key.value].line}"
            _add_mark(
                document,
                key.start_mark,
                "the key is there twice",
                found=shown(key.value),
                allowed=first,
                fix="remove one",
            )
            continue
        seen[key.value] = document.keys[(*location, key.value)] = _place(key)
        yield key.value, value


def _place(node: yaml.Node) -> Place:
    start, end = node.start_mark, node.end_mark
    style = node.style if isinstance(node, yaml.ScalarNode) else None
    plain = isinstance(node, yaml.ScalarNode) and start.line == end.line and style not in ("|", ">")
    quote = (1 if style else 0) if plain else None
    return Place(start.line + 1, start.column + 1, quote)


def _scalar(node: yaml.Node, document: Document) -> object:
    text, tag = str(node.value), node.tag.removeprefix(_TAG)
    if node.style is not None:  # type: ignore[attr-defined]
        return text
    if tag == "null":
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.match(text):
        return int(text)
    if _FLOAT.match(text) and "_" not in text and not re.match(r"[-+]?0[0-9]|[-+]?[0-9]+\Z", text):
        if math.isfinite(float(text)):
            return float(text)
        tag = "float"
    if tag != "str" or re.match(r"[-+]?[0-9]+\Z", text):
        what = "YAML versions read this value differently, or it is out of range"
        fix = f'write "{text[:40]}" for text, or a plain number, true or false'
        _add_mark(document, node.start_mark, what, found=shown(text), fix=fix)
        document.spoilt.add(_place(node))
    return text
