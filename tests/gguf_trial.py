"""Reads GGUF files that may crash a process, in a process of its own: one path a line in, one JSON object a line out.

`python gguf_trial.py header` stops before MLX opens the file, and has 256 MiB of address space beyond the imports;
`python gguf_trial.py model` builds model and tokenizer and uses both.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_audit.models.gguf import GGUFError, read_gguf

SPARE = 256 << 20


def main(mode: str) -> None:
    if mode == "header":
        mx.load = refuse
        if (status := Path("/proc/self/status")).exists():
            size = next(line for line in status.read_text().splitlines() if line.startswith("VmSize"))
            limit = int(size.split()[1]) * 1024 + SPARE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    say({"ready": True})
    for line in sys.stdin:
        say(outcome(line.rstrip("\n"), mode))


def say(result: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(result)}\n")
    sys.stdout.flush()


def outcome(path: str, mode: str) -> dict[str, Any]:
    before, start = peak(), time.perf_counter()
    try:
        checkpoint = read_gguf(path)
        if mode == "model":
            logits = checkpoint.load_model()(mx.array([[1, 2]]))
            mx.eval(logits)
            tokenizer = checkpoint.load_tokenizer()
            tokenizer.decode(tokenizer.encode("hello world"))
        result = {"kind": "model"}
    except GGUFError as error:
        result = {
            "kind": "GGUFError",
            "text": str(error),
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
        }
    except BaseException as error:
        result = {"kind": type(error).__name__, "text": str(error)}
    return result | {"grown": peak() - before, "seconds": time.perf_counter() - start}


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("mx.load saw the file")


def peak() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


if __name__ == "__main__":
    main(sys.argv[1])
