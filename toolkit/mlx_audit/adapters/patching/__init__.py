"""Patches: a model's own source, mended where it stands in the way of compiled decoding, as a unified diff.

Needs libcst, which the extra `adapt` brings.
"""

from __future__ import annotations

from importlib.util import find_spec

from mlx_audit.errors import EnvironmentUnfit

if find_spec("libcst") is None:
    raise EnvironmentUnfit("patching sources needs libcst", fix="pip install 'mlx-audit[adapt]'")

from mlx_audit.adapters.patching.base import Codemod
from mlx_audit.adapters.patching.diff import unified_diff
from mlx_audit.adapters.patching.patch import PatchedSource, codemods, patch_source

__all__ = ["Codemod", "PatchedSource", "codemods", "patch_source", "unified_diff"]
