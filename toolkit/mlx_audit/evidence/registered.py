"""Adapters of third parties: which one a model's module has, and the digest of its source; nothing is imported.

They are registered through the entry point group `mlx_audit.adapters`: the name is the full name of the model's module,
the value a class that takes the model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, resolve_name
from pathlib import Path

from mlx_audit.errors import NotCompileCapable, describe
from mlx_audit.evidence.digests import total, tree_digest, with_texts
from mlx_audit.models.modules import FILE_PREFIX

GROUP = "mlx_audit.adapters"


def registered_adapter(module: str) -> EntryPoint | None:
    """Return the adapter that is registered for a model's module, or None where the generic one serves.

    Args:
        module: Full name such as `mlx_lm.models.llama`. The names that mlx-audit gives users' files are its own, and
            nobody can register for them.

    Raises:
        NotCompileCapable: there are two, and nothing says which one is meant.
    """
    found = [] if module.startswith(FILE_PREFIX) else _registered().get(module, [])
    if len(found) > 1:
        raise NotCompileCapable(
            "several adapters are registered for this model",
            where=module,
            found=" and ".join(map(label, found)),
            allowed=f"one in the entry point group {GROUP}",
            fix="uninstall all but one",
        )
    return found[0] if found else None


def label(entry: EntryPoint) -> str:
    """Return the class of an adapter and the distribution that brings it, for messages."""
    try:
        name = entry.dist.name if entry.dist is not None else None
    except (TypeError, AttributeError, KeyError):  # it has no metadata, which importlib does not foresee
        name = None
    return f"{entry.value} of {name or 'a distribution without a name'}"


def adapter_digest(module: str) -> str | None:
    """Return the digest of the adapter that is registered for a model's module; None where the generic one serves.

    Syntax trees are digested: of the adapter's file, and of what it imports, transitively, in its own package.

    Raises:
        NotCompileCapable: there are two, or the source cannot be read.
    """
    code = adapter_code(module)
    return None if code is None else adapter_total(*code)


def adapter_total(value: str, files: Mapping[str, str]) -> str:
    """Return the digest of an adapter from its class, and the digest of each of its files by name."""
    modules = {name.removesuffix(".py").removesuffix("/__init__"): name for name in files}
    names = [modules[module] for module in sorted(modules, key=lambda module: module.replace("/", "."))]
    return with_texts(total({name: files[name] for name in names}), value)


def adapter_code(module: str) -> tuple[str, dict[str, str]] | None:
    """Return the class of the adapter that is registered for a model's module, and the digest of each of its files.

    Files are named as `package/module.py`. None where the generic adapter serves.

    Raises:
        NotCompileCapable: there are two, or the source cannot be read.
    """
    entry = registered_adapter(module)
    if entry is None:
        return None
    try:
        files = adapter_files(entry)
        roots = _roots(entry.module.partition(".")[0])
        return entry.value, {_name(file, roots): tree_digest(file) for file in files}
    except (OSError, SyntaxError, ValueError, ImportError, AttributeError, RecursionError) as error:
        raise NotCompileCapable(
            "the source of the registered adapter cannot be read",
            where=label(entry),
            found=describe(error),
            fix="mend or uninstall it",
        ) from error


def _roots(package: str) -> list[Path]:
    """Return the folders that a package, or a module without one, lies in."""
    spec = find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    return [Path(place).parent for place in places]


def _name(file: Path, roots: Sequence[Path]) -> str:
    root = next((root for root in roots if file.is_relative_to(root)), file.parent)
    return file.relative_to(root).as_posix()


@cache
def adapter_files(entry: EntryPoint) -> tuple[Path, ...]:
    """Return the Python files that an adapter consists of, sorted by module name; OSError when there are none."""
    top = entry.module.partition(".")[0]
    found: dict[str, Path] = {}
    waiting = [entry.module]
    while waiting:
        name = waiting.pop()
        file = _source(name) if name not in found else None
        if file is not None:
            found[name] = file
            waiting += [other for other in _imports(name, file) if other.partition(".")[0] == top]
    if entry.module not in found:
        raise OSError(f"there is no Python file of {entry.module}")
    return tuple(found[name] for name in sorted(found))


@cache
def _registered() -> dict[str, list[EntryPoint]]:
    """Return all of them by the module that they serve; one look at the installed distributions a process."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def _imports(name: str, file: Path) -> Iterator[str]:
    """Yield what a module may import, by full name, and the packages around it; some are attributes, not modules."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes(), filename=str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)
    yield from _with_parents(package)


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _source(name: str) -> Path | None:
    """Return the Python file of a module, or None; unlike `find_spec` of the whole name it imports no package."""
    top, *parts = name.split(".")
    spec = find_spec(top)
    if spec is None:
        return None
    file = Path(spec.origin) if spec.origin is not None else None
    folders = [Path(location) for location in spec.submodule_search_locations or ()]
    for part in parts:
        places = [folder / part / "__init__.py" for folder in folders] + [
            folder / f"{part}.py" for folder in folders
        ]
        file = next((place for place in places if place.is_file()), None)
        folders = [folder / part for folder in folders]
    return file if file is not None and file.suffix == ".py" else None
