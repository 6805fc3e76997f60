"""One real conversion that many tests look at: a tiny Hugging Face folder, quantized to 4 bits, by the command line."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from command import mlx_audit
from hf_folders import write_hf
from mlx_audit.audit.request import Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.evidence.results import Results

_kept: list[tempfile.TemporaryDirectory[str]] = []
"""As long as the process lives."""


@dataclass(frozen=True)
class Converted:
    """What `convert SRC DST -q --q-group-size 32 --json FILE` gave."""

    done: subprocess.CompletedProcess[str]
    source: Path
    folder: Path
    results: Results

    def replay(self, request: Request) -> Outcome:
        """Return what its audit found, as the outcome of another request for the same model."""
        names = {"target": request.text, "configuration": request.config_name}
        results = [result.model_copy(update=names) for result in self.results.results]
        return Outcome(request, results, self.results.environment, [], None)


@functools.cache
def converted() -> Converted:
    """Return the conversion; made once a process."""
    _kept.append(tempfile.TemporaryDirectory())
    root = Path(_kept[-1].name).resolve()
    source = write_hf(root / "hf")
    (source / "modeling_tiny.py").write_text(f"open({str(root / 'EXECUTED')!r}, 'w')", encoding="utf-8")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    options = ("--quantize", "--q-group-size", "32", "--json", root / "out.json")
    done = mlx_audit("convert", source, root / "tiny-4bit", *options)
    assert (root / "out.json").is_file(), done.stderr
    results = Results.model_validate_json((root / "out.json").read_text(encoding="utf-8"))
    return Converted(done, source, root / "tiny-4bit", results)
