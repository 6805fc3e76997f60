"""Unified diffs of patched sources, for `git apply` and `patch -p1`."""

from __future__ import annotations

import difflib
import json
import re

from mlx_audit.adapters.patching.patch import PatchedSource

_LINE = re.compile("[^\n]*\n|[^\n]+")  # str.splitlines also splits at form feeds
_NO_NEWLINE = "\n\\ No newline at end of file\n"


def unified_diff(*sources: PatchedSource) -> str:
    """Return what changed as one diff; empty where nothing did.

    mlx-lm's own files are named from the folder that holds the package, a user's file by its name alone. Write the
    text as it is, without translating line ends.
    """
    return "".join(_diff(source) for source in sources)


def _diff(source: PatchedSource) -> str:
    name = _name(source)
    lines = difflib.unified_diff(
        _LINE.findall(source.before), _LINE.findall(source.after), _quoted(f"a/{name}"), _quoted(f"b/{name}")
    )
    return "".join(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines)


def _name(source: PatchedSource) -> str:
    if source.module.startswith("mlx_lm."):
        return source.module.replace(".", "/") + ".py"
    return source.path.name


def _quoted(name: str) -> str:
    """A file name as git writes it: in quotes if it holds one or a control, with a tab after it if it has spaces."""
    if re.search(r'["\\\x00-\x1f]', name):
        return json.dumps(name, ensure_ascii=False)
    return f"{name}\t" if " " in name else name
