"""Manifests: one YAML file a model family, read strictly, with nothing in it executed."""

from __future__ import annotations

from mlx_audit.manifests.configuration import ConfigurationError, load_configuration
from mlx_audit.manifests.loader import find_manifest, load_manifest, load_manifests
from mlx_audit.manifests.problems import ManifestError, Problem
from mlx_audit.manifests.schema import Manifest, Variant, manifest_schema
from mlx_audit.manifests.syntax import Expression, ExpressionError
from mlx_audit.manifests.topology import CacheSpec

__all__ = [
    "CacheSpec",
    "ConfigurationError",
    "Expression",
    "ExpressionError",
    "Manifest",
    "ManifestError",
    "Problem",
    "Variant",
    "find_manifest",
    "load_configuration",
    "load_manifest",
    "load_manifests",
    "manifest_schema",
]
