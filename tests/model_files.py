"""Model files as users write them, healthy and harmful: copies of mlx-lm's llama with pieces replaced."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import yaml

from mlx_audit import resources
from tiny_models import config_of

FORWARD = "        out = self.model(inputs, cache, input_embeddings)\n"
"""The line of `Model.__call__` that runs the layers; harm is put before it."""

ABORT = f"        import os\n        if inputs.shape[1] == 1:\n            os.abort()\n{FORWARD}"
PRINT = f"        print('hello from the model', flush=True)\n{FORWARD}"
EXIT = f"        raise SystemExit(0)\n{FORWARD}"

BEYOND = '''
from mlx_audit.caches import FixedCapacityKVCache


class _Beyond(FixedCapacityKVCache):
    """Its guard lets a write out of range: the compiled step writes far behind the buffer."""

    def update_and_fetch(self, keys, values):
        if self._held is None:
            self._position = self._position + 100_000_000
        return super().update_and_fetch(keys, values)


def _provide(self, max_tokens, *, batch_size=1):
    from mlx_lm.models.cache import make_prompt_cache

    native = make_prompt_cache(self)
    self(mx.zeros((batch_size, 1), mx.int32), cache=native)
    return [_Beyond.like(cache, max_tokens) for cache in native]


Model.new_fixed_capacity_cache = _provide
'''


def hang(pid_file: Path) -> str:
    """Return the forward's line with a hang before it, which tells its process id first."""
    return (
        f"        import os, pathlib, time\n        pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        f"        while True:\n            time.sleep(0.1)\n{FORWARD}"
    )


def llama_source() -> str:
    """Return the source of mlx-lm's llama, found without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "models" / "llama.py").read_text(encoding="utf-8")


def write_model(folder: Path, name: str, *changes: tuple[str, str], more: str = "") -> Path:
    """Write a copy of llama as `name`.py, with pieces replaced and `more` at its end."""
    source = llama_source()
    for old, new in changes:
        assert old in source, f"mlx-lm's llama has no {old!r} any more"
        source = source.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(source + more, encoding="utf-8")
    return path


def write_config(folder: Path) -> Path:
    """Write a tiny llama configuration as `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config_of("llama")), encoding="utf-8")
    return path


def write_manifest(folder: Path, name: str) -> Path:
    """Write a manifest `name`.yaml for a copy of llama, the file `name`.py beside it."""
    stated = yaml.safe_load((resources.model_audits() / "qwen2.yaml").read_text(encoding="utf-8"))
    del stated["configurations"]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**stated, "family": name, "module": f"./{name}.py"}), encoding="utf-8")
    return path
