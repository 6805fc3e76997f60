"""What a schema cannot say: names, files, and statements that contradict each other.

These checks read the plain values of the document, whatever else is wrong with it, so that one run shows every mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import modules
from mlx_audit.manifests.expressions import parse
from mlx_audit.manifests.kinds import KINDS
from mlx_audit.manifests.problems import display, shown
from mlx_audit.manifests.schema import CONFIGURATION, MODULE, configuration_path
from mlx_audit.manifests.suggestions import did_you_mean
from mlx_audit.manifests.syntax import ExpressionError
from mlx_audit.manifests.yaml_nodes import Document, Location


def check(document: Document, folder: Path) -> None:
    """Note every contradiction and every reference to something that does not exist.

    Args:
        document: The manifest's values and their places.
        folder: The manifest's folder.
    """
    values = _mapping(document.value)
    module = values.get("module")
    module = module if isinstance(module, str) and MODULE.fullmatch(module) else None
    _module(document, folder, module)
    _names(document, modules.argument_names(folder, module) if module else None)
    _configurations(document, folder, _list(values.get("configurations")))
    _repetitions(document, values)
    _claims(document, _mapping(values.get("variants")))
    _reachable(
        document,
        ("topology", "layers"),
        list(enumerate(_list(_mapping(values.get("topology")).get("layers")))),
    )
    _reachable(document, ("variants",), list(_mapping(values.get("variants")).items()))


def _module(document: Document, folder: Path, module: str | None) -> None:
    problem = modules.missing(folder, module) if module else None
    if problem is not None:
        document.add(("module",), problem[0], found=shown(module), fix=problem[1])


def _names(document: Document, known: frozenset[str] | None) -> None:
    """Every name in an expression, and every tiny argument, must be one that the model's module knows."""
    if known is None:
        return
    for location, text, indexed in _expressions(_mapping(document.value)):
        try:
            names = parse(text).names
        except ExpressionError:
            continue  # the schema has said so
        for name, column in names.items():
            if name in known or (name == "i" and indexed):
                continue
            fix = did_you_mean(name, [*sorted(known), "i"] if indexed else sorted(known))
            what = "`i` is only known in topology.layers" if name == "i" else "unknown name"
            document.add(location, what, offset=column - 1, found=name, fix=fix)
    for variant, body in _mapping(_mapping(document.value).get("variants")).items():
        for name in _mapping(_mapping(body).get("tiny")):
            if name not in known:
                fix = did_you_mean(name, sorted(known))
                location = ("variants", variant, "tiny", name)
                document.add(location, "not an argument of the model", key=True, found=shown(name), fix=fix)


def _expressions(values: dict[str, Any]) -> Iterator[tuple[Location, str, bool]]:
    """All expressions with their location, and whether `i` is known there."""
    topology = _mapping(values.get("topology"))
    if isinstance(topology.get("count"), str):
        yield ("topology", "count"), topology["count"], False
    for key in ("before", "layers"):
        for at, rule in enumerate(_list(topology.get(key))):
            yield from _of_rule(("topology", key, at), _mapping(rule), key == "layers")
    for name, variant in _mapping(values.get("variants")).items():
        when = _mapping(variant).get("when")
        if isinstance(when, str):
            yield ("variants", name, "when"), when, False


def _of_rule(location: Location, rule: dict[str, Any], indexed: bool) -> Iterator[tuple[Location, str, bool]]:
    kind = rule.get("cache")
    owner = KINDS.get(kind) if isinstance(kind, str) else None
    for name in ("when", *(owner.parameters if owner else ())):
        if isinstance(rule.get(name), str):
            yield (*location, name), rule[name], indexed
    for at, part in enumerate(_list(rule.get("of"))):
        yield from _of_rule((*location, "of", at), _mapping(part), indexed)


def _configurations(document: Document, folder: Path, names: list[Any]) -> None:
    """Every configuration must exist inside its folder."""
    for at, name in enumerate(names):
        location = ("configurations", at)
        if not isinstance(name, str) or not CONFIGURATION.fullmatch(name):
            continue  # the schema has said so
        try:
            path = configuration_path(folder, name)
        except MlxAuditError as error:
            document.add(location, error.what, found=shown(name), allowed=str(error.allowed))
            continue
        if not path.is_file():
            known = sorted(other.stem for other in path.parent.glob("*.json"))
            fix = did_you_mean(name, known) or f"add {display(path)}"
            document.add(location, "no such configuration", found=shown(name), fix=fix)


def _repetitions(document: Document, values: dict[str, Any]) -> None:
    for key in ("rope", "configurations"):
        seen: set[str] = set()
        for at, item in enumerate(_list(values.get(key))):
            name = str(next(iter(item), "") if isinstance(item, dict) else item)
            if name in seen:
                document.add((key, at), "there twice", found=shown(name), fix="remove one")
            seen.add(name)


def _claims(document: Document, variants: dict[str, Any]) -> None:
    """`limited` names its limits, and `capable` has none."""
    for name, variant in variants.items():
        limits = _list(_mapping(variant).get("limits"))
        claim = _mapping(_mapping(variant).get("claims")).get("compiled_decode")
        location: Location = ("variants", name, "claims", "compiled_decode")
        if claim == "limited" and not limits:
            document.add(location, "a limited claim names no limits", found=shown(claim), fix="add `limits:`")
        if claim == "capable" and limits:
            fix = "claim `limited`, or remove the limits"
            document.add(location, "a capable claim has limits", found=shown(claim), fix=fix)


def _reachable(document: Document, location: Location, items: list[tuple[Any, Any]]) -> None:
    """A rule or variant without `when` covers all that follows, so it must be the last."""
    for key, item in items[:-1]:
        if isinstance(item, dict) and "when" not in item:
            what = "nothing after this can ever apply"
            document.add(
                (*location, key), what, found=f"no `when` at {key}", fix="give it a `when`, or put it last"
            )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
