"""What must be the same for a stored state to mean the same: a typed, length-prefixed digest of everything that counts.

Fields are encoded as tag, type, length and bytes. So an adapter "X" is not a salt "X", an absent salt is not an empty
one, and no two lists of values run into each other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_audit.errors import ShapeMismatch
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.snapshot import leaf_bytes

Value = None | bool | int | str | bytes | tuple["Value", ...]

_ROW = 4096
_BLOCKS = 64
_BLOCK = 4096
_MOST_HEADER = 100 << 20


@dataclass(frozen=True)
class Fingerprint:
    """Everything that a cached state depends on besides the tokens. A field that is None is stated as absent.

    Attributes:
        weights: Digest of the weights: `checkpoint_digest` or `weights_digest`.
        model: Name of the model's class, and of each module its class and settings, such as the base of a rope.
        quantization: Bits, group size and mode of each quantized module, or a name.
        adapter: Name or digest of an adapter such as LoRA.
        tokenizer: Digest of the tokenizer.
        template: Digest of the chat template.
        dtype: Of activations and cache.
        window: Of rotating caches, where the caller sets it (`max_kv_size`).
        capacity_grid: Capacities or chunk grid that states were made with.
        tool_format: How tools are rendered into the prompt.
        engine: Versions and device; another kernel gives other last bits.
        tenant: Whose prefix it is; nobody else's query meets it.
        salt: The caller's own separator.
        media: Digests of pictures and sounds in the order of their placeholders, which are the same for all of them.
    """

    weights: Value = None
    model: Value = None
    quantization: Value = None
    adapter: Value = None
    tokenizer: Value = None
    template: Value = None
    dtype: Value = None
    window: Value = None
    capacity_grid: Value = None
    tool_format: Value = None
    engine: Value = None
    tenant: Value = None
    salt: Value = None
    media: Value = None

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """One digest for each field, which tells what differs without telling what it is."""
        return {
            field.name: hashlib.sha256(_tagged(field.name, getattr(self, field.name))).hexdigest()
            for field in fields(self)
        }

    @cached_property
    def digest(self) -> str:
        """The digest of all fields."""
        encoded = b"".join(_tagged(field.name, getattr(self, field.name)) for field in fields(self))
        return hashlib.sha256(_tagged("mlx-audit/fingerprint/1", encoded)).hexdigest()

    def require_same(self, stated: Mapping[str, str], where: str) -> None:
        """Refuse the `parts` of another fingerprint.

        Raises:
            PrefixRefused: other-fingerprint; the message names the fields.
        """
        own = self.parts
        differing = [name for name in own if own[name] != stated.get(name)]
        differing += sorted(set(stated) - set(own))
        if differing:
            raise PrefixRefused(
                Reason.OTHER_FINGERPRINT,
                f"stored for another {', '.join(differing)}",
                where=where,
                found={name: str(stated.get(name, "absent"))[:12] for name in differing},
                allowed={name: own.get(name, "absent")[:12] for name in differing},
                fix="use the store of this model and namespace, or make a new one",
            )


def of_model(model: nn.Module, **others: Value) -> Fingerprint:
    """Return the fingerprint of a live model; `others` are fields that the model does not tell.

    Weights, module, quantization, dtype and engine are read from the model, unless they are given.
    """
    parameters = _parameters(model)
    told: dict[str, Value] = {
        "model": (f"{type(model).__module__}.{type(model).__qualname__}", _settings(model)),
        "quantization": _quantization(model),
        "dtype": tuple(sorted({str(array.dtype) for _, array in parameters})),
        "engine": (version("mlx"), version("mlx-lm"), str(mx.default_device())),
    }
    if "weights" not in others:
        told["weights"] = weights_digest(model)
    return Fingerprint(**{**told, **others})


def weights_digest(model: nn.Module) -> str:
    """Return a digest of a live model's arrays: name, form, and sums of all their bits by row and by column.

    Private ones, such as the frequencies of a rope, are no parameters, and count as well. Every value is read, where it
    lies, as one decode step does. This tells models apart, those that differ in one value as well; it does not
    authenticate them.
    """
    total = hashlib.sha256()
    for name, array in _arrays(model):
        try:
            sums = b"".join(map(leaf_bytes, _sums(array)))
        except RuntimeError:
            if not name.rpartition(".")[2].startswith("_"):
                raise
            sums = b"lazy"  # made by another thread, and never evaluated: no forward of this one can use it
        total.update(_tagged(name, (str(array.dtype), tuple(array.shape), sums)))
    return f"sums:{total.hexdigest()}"


def checkpoint_digest(folder: Path, *, whole: bool = False) -> str:
    """Return a digest of the safetensors files of a checkpoint.

    By default of name, size and header of each file, and of 64 blocks of 4 KiB spread over it: two fine-tuned models of
    one base have equal headers. It tells checkpoints apart; it does not authenticate them.

    Args:
        folder: The checkpoint.
        whole: Digest every byte instead.

    Raises:
        PrefixRefused: there is no such file, or one has no safetensors header.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PrefixRefused(Reason.DAMAGED, "no *.safetensors files to digest", where=str(folder))
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            if whole:
                content = hashlib.file_digest(file, "sha256").digest()
            else:
                content = b"".join(_sampled(file, size, path))
        total.update(_tagged(path.name, (size, content)))
    return f"{'whole' if whole else 'sample'}:{total.hexdigest()}"


def _sampled(file: BinaryIO, size: int, path: Path) -> Iterator[bytes]:
    """Yield a file's header and blocks of its data."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 0 < length <= min(size - 8, _MOST_HEADER):
        raise PrefixRefused(
            Reason.DAMAGED, "not a safetensors file", where=str(path), found=f"a header of {length} bytes"
        )
    yield start + file.read(length)
    data = 8 + length
    last = max(0, size - data - _BLOCK)
    for index in range(_BLOCKS):
        file.seek(data + last * index // (_BLOCKS - 1))
        yield file.read(_BLOCK)


def _parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Return a model's parameters by name, in a fixed order."""
    found: Any = tree_flatten(model.parameters())
    return sorted(found, key=lambda item: item[0])


def _arrays(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Return a model's parameters and the private arrays of its modules by name, in a fixed order."""
    own = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in module.items()
        if key.startswith("_") and isinstance(value, mx.array)
    }
    return sorted({**own, **dict(_parameters(model))}.items())


def _sums(array: mx.array) -> list[mx.array]:
    """Return sums over an array's bits as 32-bit words, or as bytes, in rows of `_ROW`; they wrap around."""
    flat = mx.reshape(array, (-1,))
    words = mx.view(flat, mx.uint32 if array.nbytes % 4 == 0 else mx.uint8)
    whole = words.size - words.size % _ROW
    sums = [words[whole:]]
    if whole:
        rows = mx.reshape(words[:whole], (-1, _ROW))
        sums += [mx.sum(rows, axis=0), mx.sum(rows, axis=1)]
    mx.eval(sums)
    return sums


def _settings(model: nn.Module) -> Value:
    """Return the class of each module with its numbers, texts and dataclasses, but not whether it is in training."""
    found: list[Value] = []
    for name, module in sorted(model.named_modules(), key=lambda item: item[0]):
        settings = tuple(
            (key, repr(value))
            for key, value in sorted(vars(module).items())
            if key != "_training" and (isinstance(value, bool | int | float | str) or is_dataclass(value))
        )
        found.append((name, f"{type(module).__module__}.{type(module).__qualname__}", settings))
    return tuple(found)


def _quantization(model: nn.Module) -> Value:
    """Return what each quantized module states of itself."""
    found: list[Value] = []
    for name, module in sorted(model.named_modules(), key=lambda item: item[0]):
        settings: Any = module
        if isinstance(getattr(settings, "bits", None), int):
            mode = getattr(settings, "mode", None)
            found.append((name, settings.bits, getattr(settings, "group_size", None), mode))
    return tuple(found) if found else None


def _tagged(tag: str, value: Value) -> bytes:
    """Return tag, type, length and bytes of a value; no two values have the same encoding."""
    kind, content = _encoded(value)
    name = tag.encode()
    return struct.pack("<Q", len(name)) + name + kind + struct.pack("<Q", len(content)) + content


def _encoded(value: Value) -> tuple[bytes, bytes]:
    match value:
        case None:
            return b"n", b""
        case bool():
            return b"t", str(value).encode()
        case int():
            return b"i", str(value).encode()
        case str():
            return b"s", value.encode("utf-8", "surrogatepass")
        case bytes():
            return b"b", value
        case tuple():
            return b"l", b"".join(_tagged("", item) for item in value)
    raise ShapeMismatch(
        "a fingerprint cannot hold such a value",
        where="namespace",
        found=type(value).__name__,
        allowed="texts, integers, bytes, and tuples of them",
    )
