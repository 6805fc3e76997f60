"""`adapt --as module`: the adapter of a family as a Python module, from its manifest alone.

The text depends on the manifest, the template and nothing else, so that regenerating gives the same bytes.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlx_audit import resources
from mlx_audit._version import __version__
from mlx_audit.adapters.generation.layout import header, statement
from mlx_audit.adapters.generation.python_source import (
    Token,
    attribute_path,
    call,
    needs_arguments,
    tokens_of,
    uses,
)
from mlx_audit.caches import FixedCapacityCache, cache_class
from mlx_audit.errors import MlxAuditError, TargetError
from mlx_audit.evidence.capability import manifest_beside
from mlx_audit.evidence.digests import manifest_digest
from mlx_audit.evidence.records import minor
from mlx_audit.manifests import Manifest, ManifestError
from mlx_audit.manifests.kinds import Rule
from mlx_audit.manifests.syntax import Expression
from mlx_audit.models.target import Target

_PROVENANCE = re.compile(r"^# Made by mlx-audit (\d+\.\d+) from ")
_DIGITS = 16


class _Branch(NamedTuple):
    """An `if` and what it does; no lines where there is nothing to ask or to do."""

    head: list[str]
    body: list[str]


def render_adapter(manifest: Manifest) -> str:
    """Return the module: a class `Adapter` that takes the model and implements `FixedCapacityKVCacheProviding`.

    It declares the cache of each layer in plain Python, and refuses a model that keeps others.
    """
    topology = manifest.topology
    rules = [*topology.before, *topology.layers]
    expressions = [topology.count, *(expression for rule in rules for expression in _expressions(rule))]
    covered = topology.layers[-1].when is None
    templates = Environment(
        loader=FileSystemLoader(resources.templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template("adapter.py.j2").render(
        version=minor(__version__),
        file=_file_name(manifest),
        digest=manifest_digest(manifest)[: len("sha256:") + _DIGITS],
        target=_target(manifest),
        imports=_imports(rules, covered),
        arguments=attribute_path(manifest.arguments) if any(map(needs_arguments, expressions)) else "",
        before=[branch for rule in topology.before for branch in _branches([rule], 8)],
        loop=_loop(
            topology.count, any(uses(e, "i") for r in topology.layers for e in _expressions(r)) or not covered
        ),
        layers=list(_branches(topology.layers, 12)),
        covered=covered,
    )


def generated_text(target: Target) -> str:
    """Return the module of what a command line names.

    Raises:
        TargetError: no manifest declares it.
    """
    if target.manifest is None:
        raise undeclared(target.text)
    return render_adapter(target.manifest)


def undeclared(text: str) -> TargetError:
    """Return the error for a target that no manifest declares, or for a model file in place of its manifest."""
    if (beside := _manifest_beside(Path(text))) is not None:
        return TargetError(
            "a module is made from a manifest, not from the model's file",
            where=text,
            fix=f"name {shlex.quote(str(beside))}",
        )
    return TargetError(
        "no manifest declares this target, so there is nothing to make an adapter from",
        where=text,
        allowed="a family with a manifest, or a manifest",
        fix=f"mlx-audit draft {shlex.quote(text)} --config config.json -o FAMILY.yaml, then name FAMILY.yaml",
    )


def _manifest_beside(file: Path) -> Path | None:
    try:
        found = manifest_beside(file) if file.is_file() else None
    except ManifestError as error:
        return Path(error.problems[0].file)
    return None if found is None else found.path


def is_current(target: Target, file: Path) -> tuple[bool, str]:
    """Return whether a file is what would be generated now, and how it differs where it is not.

    A file that another version of mlx-audit made alike is current.

    Raises:
        OSError: the file cannot be read.
    """
    old, new = file.read_text(encoding="utf-8", errors="replace"), generated_text(target)
    if _without_version(old) == _without_version(new):
        return True, ""
    names = (f"{file} (as it is)", f"{file} (generated now)")
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="", n=1)
    return False, "\n".join(lines)


def is_generated(text: str) -> bool:
    """Return whether a text begins with the line that this module writes."""
    return _PROVENANCE.match(text) is not None


def _without_version(text: str) -> str:
    return _PROVENANCE.sub("# Made by mlx-audit from ", text)


def _target(manifest: Manifest) -> str:
    """Return what the command line calls the manifest, wherever it is run."""
    shipped = manifest.path.resolve().parent == resources.model_audits().resolve()
    return manifest.family if shipped else _file_name(manifest)


def _file_name(manifest: Manifest) -> str:
    """Return the name of the manifest's file, fit for a comment: in the first line `coding=…` would mean something."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", manifest.path.name)


def _expressions(rule: Rule) -> Iterator[Expression]:
    if rule.when is not None:
        yield rule.when
    yield from rule.values().values()
    for part in getattr(rule, "of", ()):
        yield from _expressions(part)


def _imports(rules: Sequence[Rule], covered: bool) -> list[str]:
    classes = {cls for rule in rules for cls in _classes(rule)}
    found = {f"from {cls.__module__} import {cls.__name__}" for cls in classes}
    return sorted(found | (set() if covered else {"from mlx_audit.errors import NotCompileCapable"}))


def _classes(rule: Rule) -> Iterator[type[FixedCapacityCache]]:
    if rule.cache != "none":
        yield _class(rule)
    for part in getattr(rule, "of", ()):
        yield from _classes(part)


def _class(rule: Rule) -> type[FixedCapacityCache]:
    cls = cache_class(rule.cache)
    if cls is None:
        raise MlxAuditError("there is no fixed-capacity cache of this kind", found=rule.cache)
    return cls


def _loop(count: Expression, indexed: bool) -> list[str]:
    counted = call("range", [tokens_of(count)])
    return header(f"for {'i' if indexed else '_'} in", counted, 8)


def _branches(rules: Sequence[Rule], indent: int) -> Iterator[_Branch]:
    """Yield the rules as a chain of `if`, `elif` and `else`."""
    for number, rule in enumerate(rules):
        alone = number == 0
        if rule.when is not None:
            head = header("if" if alone else "elif", tokens_of(rule.when), indent)
        else:
            head = [] if alone else [" " * indent + "else:"]
        nothing = rule.cache == "none"
        if nothing and rule.when is None:
            if alone:
                yield _Branch([], [" " * indent + "pass"])
            return
        deeper = indent + 4 if head else indent
        body = (
            [" " * deeper + "pass"] if nothing else statement(call("entries.append", [_entry(rule)]), deeper)
        )
        yield _Branch(head, body)


def _entry(rule: Rule) -> list[Token]:
    parts = [_entry(part) for part in getattr(rule, "of", ())]
    values = [[Token(f"{name}="), *tokens_of(value)] for name, value in rule.values().items()]
    return call("entry", [[Token(_class(rule).__name__)], *parts, *values])
