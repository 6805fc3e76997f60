"""Saved sessions taken apart and put together again, for tests of hostile files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from mlx_audit.decode import CompiledDecodeSession
from tiny_models import shared_model


def load(path: Path, model: Any = None) -> CompiledDecodeSession:
    return CompiledDecodeSession.load(path, model or shared_model(), evidence="ignore")


def taken_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a safetensors file's header and its data."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def put_together(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def changed_session_header(path: Path, **changes: Any) -> None:
    header, data = taken_apart(path)
    own = json.loads(header["__metadata__"]["mlx_audit"])
    own.update(changes)
    header["__metadata__"]["mlx_audit"] = json.dumps(own)
    put_together(path, header, data)
