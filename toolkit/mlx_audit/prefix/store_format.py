"""The manifest of a store: strict, versioned, sealed with its own checksum, read without trust."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_audit.prefix.layers import DTYPES, ArrayForm, Layer
from mlx_audit.prefix.reasons import PrefixRefused, Reason
from mlx_audit.prefix.rules import RULES
from mlx_audit.prefix.snapshot import check_layers
from mlx_audit.prefix.store_files import BODY

FORMAT = "mlx-audit/prefix-store/1"
MOST_MANIFEST = 64 << 20
"""Bytes of a manifest; token ids take 16 bytes for each three."""
_MOST_VALUES = 4_000_000
"""Values in a manifest: a small text can state many, each of which costs some 60 bytes once read."""
_DEEPEST = 8
_MOST = 2**31 - 1

_Integer = Annotated[int, Field(ge=0, le=_MOST)]
_Size = Annotated[int, Field(ge=0, le=2**53)]


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _FormText(_Text):
    dtype: str
    shape: Annotated[list[_Integer], Field(max_length=8)]


class _LayerText(_Text):
    kind: str
    native: str
    position: _Integer
    parameters: dict[str, _Integer]
    forms: list[_FormText | None]
    parts: list[_LayerText]


class _EntryText(_Text):
    tokens: str
    body: str
    size: _Size
    kind: Literal["output", "checkpoint", "prompt"]
    stops: list[_Integer] | None
    layers: list[_LayerText]


class _Content(_Text):
    parts: dict[str, str]
    entries: list[_EntryText]


@dataclass(frozen=True)
class StatedEntry:
    """An entry as its manifest states it.

    Attributes:
        tokens: Its key, packed int32.
        body: Name of the file that holds its arrays, which is the digest of that file.
        size: Bytes of that file.
        layers: Its stack, without arrays.
        stops: Where the chunks ended that made it, its own position last; None: not known.
        kind: Where it was taken, which decides how early it is evicted.
    """

    tokens: bytes
    body: str
    size: int
    layers: tuple[Layer, ...]
    stops: tuple[int, ...] | None = None
    kind: str = "prompt"


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32.

    Raises:
        PrefixRefused: key-mismatch: not ids of 0 and more that fit.
    """
    ids = np.asarray(tokens if len(tokens) else np.zeros(0, np.int32))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and (ids.min() < 0 or ids.max() > _MOST)):
        raise PrefixRefused(Reason.KEY_MISMATCH, "the key is no list of token ids", allowed=f"0 to {_MOST}")
    return ids.astype("<i4").tobytes()


def written(fingerprint: Mapping[str, str], entries: Sequence[StatedEntry]) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        PrefixRefused: too-large.
    """
    content = {"parts": dict(fingerprint), "entries": [_entry_text(entry) for entry in entries]}
    text = json.dumps({"format": FORMAT, "sha256": _seal(content), "content": content}).encode()
    _require_readable(text, "save")
    return text


def parsed(text: bytes, where: str) -> tuple[dict[str, str], list[StatedEntry]]:
    """Return the fingerprint's parts and the entries of a manifest.

    Raises:
        PrefixRefused: format-version, damaged, unknown-field, unknown-class, position-mismatch.
    """

    def damaged(detail: str, found: object = None) -> PrefixRefused:
        return PrefixRefused(Reason.DAMAGED, detail, where=where, found=found)

    _require_readable(text, where)
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise damaged("the manifest is not JSON", error) from error
    if not isinstance(document, dict) or "format" not in document:
        raise damaged("the manifest states no format")
    if document["format"] != FORMAT:
        raise PrefixRefused(Reason.FORMAT_VERSION, where=where, found=document["format"], allowed=FORMAT)
    extra = sorted(set(document) - {"format", "sha256", "content"})
    if extra:
        raise PrefixRefused(Reason.UNKNOWN_FIELD, where=where, found=extra)
    if document.get("sha256") != _seal(document.get("content")):
        raise damaged("the manifest is not what was written: its checksum differs")
    try:
        content = _Content.model_validate(document["content"])
        entries = [_entry(entry, f"{where} entry {i}") for i, entry in enumerate(content.entries)]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        unknown = first["type"] == "extra_forbidden"
        raise PrefixRefused(
            Reason.UNKNOWN_FIELD if unknown else Reason.DAMAGED,
            first["msg"],
            where=f"{where} {'.'.join(map(str, first['loc']))}",
        ) from error
    except RecursionError as error:
        raise damaged("the manifest is nested too deeply") from error
    if len({entry.tokens for entry in entries}) != len(entries):
        raise damaged("two entries have one key")
    return content.parts, entries


def _require_readable(text: bytes, where: str) -> None:
    """Refuse a manifest that would need too much memory."""
    values = sum(map(text.count, (b",", b"[", b"{")))
    if len(text) > MOST_MANIFEST or values > _MOST_VALUES:
        raise PrefixRefused(
            Reason.TOO_LARGE,
            "too many keys for one store",
            where=where,
            found=f"{len(text)} bytes, {values} values",
            allowed=f"{MOST_MANIFEST} bytes, {_MOST_VALUES} values",
        )


def _seal(content: object) -> str:
    """Return the checksum of a manifest's content, whatever its spacing."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is stated twice")
    return found


def _entry_text(entry: StatedEntry) -> dict[str, Any]:
    return {
        "tokens": base64.b64encode(entry.tokens).decode(),
        "body": entry.body,
        "size": entry.size,
        "kind": entry.kind,
        "stops": None if entry.stops is None else list(entry.stops),
        "layers": [_layer_text(layer) for layer in entry.layers],
    }


def _layer_text(layer: Layer) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "native": RULES[layer.kind].native,
        "position": layer.position,
        "parameters": dict(layer.parameters),
        "forms": [form and {"dtype": form.dtype, "shape": list(form.shape)} for form in layer.forms],
        "parts": [_layer_text(part) for part in layer.parts],
    }


def _entry(text: _EntryText, where: str) -> StatedEntry:
    try:
        tokens = base64.b64decode(text.tokens, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PrefixRefused(Reason.DAMAGED, "the key is not base64", where=where) from error
    if BODY.fullmatch(text.body) is None:
        raise PrefixRefused(Reason.DAMAGED, "not the name of a body", where=where, found=text.body)
    layers = tuple(_layer(layer, f"{where} layer {i}", 0) for i, layer in enumerate(text.layers))
    if len(tokens) % 4 or (len(tokens) and np.frombuffer(tokens, "<i4").min() < 0):
        raise PrefixRefused(Reason.DAMAGED, "the key is no list of token ids", where=where)
    try:
        check_layers(layers, len(tokens) // 4)
    except PrefixRefused as error:
        error.where = f"{where} {error.where or ''}".rstrip()
        raise
    stops = None if text.stops is None else tuple(text.stops)
    require_stops(stops, len(tokens) // 4, where)
    return StatedEntry(tokens, text.body, text.size, layers, stops, text.kind)


def require_stops(stops: tuple[int, ...] | None, position: int, where: str) -> None:
    """Refuse chunk ends that do not lead to the position, one after the other."""
    if stops is not None and (not stops or stops[-1] != position or list(stops) != sorted({*stops} - {0})):
        raise PrefixRefused(
            Reason.DAMAGED, "the chunks do not lead to the end of the key", where=where, found=stops[-3:]
        )


def _layer(text: _LayerText, where: str, depth: int) -> Layer:
    rule = RULES.get(text.kind)
    if rule is None or rule.native != text.native:
        raise PrefixRefused(
            Reason.UNKNOWN_CLASS,
            where=where,
            found=f"{text.kind} {text.native}",
            allowed=", ".join(f"{rule.kind} {rule.native}" for rule in RULES.values()),
        )
    if depth > _DEEPEST:
        raise PrefixRefused(Reason.DAMAGED, "the caches are nested too deeply", where=where)
    return Layer(
        text.kind,
        text.position,
        text.parameters,
        tuple(None if form is None else _form(form, where) for form in text.forms),
        tuple(_layer(part, f"{where} part {i}", depth + 1) for i, part in enumerate(text.parts)),
    )


def _form(text: _FormText, where: str) -> ArrayForm:
    if text.dtype not in DTYPES:
        raise PrefixRefused(
            Reason.DAMAGED, "unknown dtype", where=where, found=text.dtype, allowed=list(DTYPES)
        )
    return ArrayForm(tuple(text.shape), text.dtype)
