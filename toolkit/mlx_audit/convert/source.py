"""What SRC is: a Hugging Face or MLX folder, a GGUF file, or the name of a repository on the Hub."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from mlx_audit.convert.options import ConvertOptions
from mlx_audit.convert.safetensors_header import Tensor, WeightsError, read_weights_header
from mlx_audit.errors import TargetError
from mlx_audit.evidence.stamps import OTHERS, WEIGHTS
from mlx_audit.models.target import SMOLLM2, Target, resolve_target

KEPT = frozenset(("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt"))
"""Names of files that come along, though they decide nothing."""

_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_WEIGHTS = re.compile(r"model[A-Za-z0-9._-]*\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_INDEX = "model.safetensors.index.json"
_MOST_BYTES = 256 << 20
"""Of a file that holds no weights; the largest tokenizers take 35 MB."""
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be converted; nothing of it has been loaded.

    Attributes:
        text: As the user typed it.
        kind: `gguf`, `mlx` (its weights are as MLX writes them) or `hf`.
        path: The file or folder, resolved.
        target: The same as a TARGET of an audit.
        files: In a folder, the real files to take, by name.
        left_out: Files that stay behind, each with the reason.
        tensors: In a folder, what the weight files hold.
    """

    text: str
    kind: Literal["gguf", "mlx", "hf"]
    path: Path
    target: Target
    files: Mapping[str, Path] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are quantized as MLX does it."""
        return bool((self.target.config or {}).get("quantization"))

    @property
    def needs_copy_only(self) -> bool:
        """Whether MLX can load it as it is."""
        return self.kind == "mlx"

    def least_bytes(self, options: ConvertOptions) -> int:
        """Return how much room its weights take at least, once converted."""
        if self.kind == "gguf":
            return self.path.stat().st_size // 2 if options.quantize else self.path.stat().st_size
        item = {"float32": 4, "bfloat16": 2, "float16": 2}.get(options.dtype or "")
        total = 0.0
        for tensor in self.tensors.values():
            plain = (
                tensor.elements * item
                if item and tensor.dtype in ("F64", "F32", "F16", "BF16")
                else tensor.bytes
            )
            packed = tensor.elements * options.bits_per_weight / 8
            total += min(plain, packed) if options.quantize and len(tensor.shape) > 1 else plain
        return int(total)


def resolve_source(text: str) -> Source:
    """Return what SRC names, looked at but not loaded.

    Raises:
        TargetError, WeightsError: there is nothing of that name, or it cannot be converted.
    """
    path = Path(text)
    if text == SMOLLM2 or path.suffix == ".gguf":
        target = resolve_target(text)
        assert target.folder is not None, "a GGUF file is a checkpoint"
        return Source(text, "gguf", target.folder, target)
    if not path.is_dir() and not path.exists() and _HUB.fullmatch(text):
        return _folder(text, _download(text))
    if path.is_dir():
        return _folder(text, path)
    raise TargetError(
        "no such checkpoint",
        where="SRC",
        found=text,
        allowed="a Hugging Face or MLX folder, a .gguf file, smollm2, or a Hub id such as org/name",
    )


def _download(repository: str) -> Path:
    """Return the snapshot of a Hub repository, from the cache where it is there; no code and no pickles."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=[*OTHERS, *KEPT, WEIGHTS]))
    except Exception as error:
        raise TargetError(
            "the repository cannot be had from the Hub",
            where=repository,
            found=f"{type(error).__name__}: {error}",
            allowed="a folder, or a repository that is in the cache or can be reached",
        ) from error


def _folder(text: str, folder: Path) -> Source:
    files, left_out = _select(folder)
    target = resolve_target(str(folder.absolute()))
    config = target.config or {}
    headers = {name: read_weights_header(path) for name, path in files.items() if fnmatchcase(name, WEIGHTS)}
    tensors: dict[str, Tensor] = {}
    homes: dict[str, str] = {}
    for name, header in headers.items():
        if twice := tensors.keys() & header.tensors.keys():
            raise WeightsError("a tensor is in two files", where=f"{folder / name}: {min(twice)}")
        tensors |= header.tensors
        homes |= dict.fromkeys(header.tensors, name)
    if _INDEX in files:
        _require_index(files[_INDEX], homes)
    _require_layers(folder, config, len(tensors))
    mlx = all(header.metadata.get("format") == "mlx" for header in headers.values())
    return Source(text, "mlx" if mlx else "hf", folder.resolve(), target, files, left_out, tensors)


def _select(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files to take, by name, and what stays behind, with reasons.

    Raises:
        TargetError: a file that would be taken leads out of the folder, is none, or is too large.
    """
    taken, left_out = {}, []
    for entry in sorted(folder.iterdir(), key=lambda path: path.name):
        name = entry.name
        if fnmatchcase(name, WEIGHTS) and not _WEIGHTS.fullmatch(name):
            raise TargetError(
                "a weight file has no usable name",
                where=str(folder),
                found=repr(name),
                allowed="letters, digits, . _ -",
            )
        if name in OTHERS or name in KEPT or fnmatchcase(name, WEIGHTS):
            taken[name] = _real(folder, entry)
        elif not name.startswith(".") and name != "mlx_audit.json":
            left_out.append(f"{name} ({_why(entry)})")
    return taken, left_out


def _why(entry: Path) -> str:
    if entry.suffix == ".py":
        return "code is never copied, nor run"
    if entry.suffix in _PICKLES:
        return "a pickle could run code"
    return "not a file of a model that mlx-lm reads"


def _real(folder: Path, entry: Path) -> Path:
    """Return the real file of an entry; a link may lead within the folder, or as in the Hub's cache."""
    try:
        real = entry.resolve(strict=True)
        found = real.stat()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise TargetError("a file cannot be read", where=str(entry), found=error) from error
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise TargetError(
            "a link leads out of the folder",
            where=str(entry),
            found=str(real),
            allowed="files in the folder, or a snapshot in the Hub's cache and its blobs",
            fix="copy the file in its place",
        )
    if not stat.S_ISREG(found.st_mode):
        raise TargetError("this is no file", where=str(entry), allowed="a regular file")
    if found.st_size > _MOST_BYTES and not fnmatchcase(entry.name, WEIGHTS):
        raise TargetError(
            "the file is too large", where=str(entry), found=found.st_size, allowed=f"{_MOST_BYTES} bytes"
        )
    return real


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folders that its files may lie in: itself, and the blobs beside a snapshot of the Hub's cache."""
    real = folder.resolve()
    yield real
    if real.parent.name == "snapshots":
        yield real.parent.parent / "blobs"


def _require_index(path: Path, homes: Mapping[str, str]) -> None:
    """Refuse an index that names files which are not there, or other ones than hold the tensors."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        stated: Any = index["weight_map"]
        pairs = dict(stated.items())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            "the index cannot be read", where=_INDEX, found=f"{type(error).__name__}: {error}"
        ) from error
    for tensor, file in pairs.items():
        if homes.get(tensor) != file:
            raise WeightsError(
                "the index does not match the weight files",
                where=f"{_INDEX}: {tensor}",
                found=file,
                allowed=homes.get(tensor, "no such tensor"),
                fix="get the index and the weights again",
            )


def _require_layers(folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse more layers than there are tensors: building them would take all memory."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in _LAYERS:
            count = part.get(key)
            if isinstance(count, int | float) and count > tensors:
                raise TargetError(
                    "the configuration has more layers than there are tensors",
                    where=f"{folder / 'config.json'}: {key}",
                    found=count,
                    allowed=f"at most {tensors}",
                )
