"""Small distributions as an installer would leave them: a module, and a folder *.dist-info beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlx_audit.evidence import registered

GROUP = "mlx_audit.adapters"

PLAIN = '''"""An adapter of a third party."""

from mlx_audit.adapters import allocate, entry
from mlx_audit.caches import FixedCapacityKVCache


class Adapter:
    def __init__(self, model):
        self.model = model

    def new_fixed_capacity_cache(self, max_tokens, *, batch_size=1):
        entries = [entry(FixedCapacityKVCache) for _ in self.model.layers]
        return allocate(self.model, entries, max_tokens, batch_size)
'''


def write_distribution(
    folder: Path, name: str, files: Mapping[str, str], adapters: Mapping[str, str]
) -> Path:
    """Write a distribution below `folder` and return the folder to put on `sys.path`.

    Args:
        folder: Where.
        name: Of the distribution.
        files: Sources by path.
        adapters: Entry points `module.of.the.model: package.module:Class`.
    """
    site = folder / f"site-{name}"
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{module} = {value}" for module, value in adapters.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
    for path, source in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return site


def forget() -> None:
    """Look at the installed distributions again, as a new process would."""
    registered._registered.cache_clear()
    registered.adapter_files.cache_clear()
