"""`mlx-audit generate`: text from a checkpoint, through a compiled session where that is proved."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_audit.cli import _choices, _console
from mlx_audit.errors import MlxAuditError, NotCompileCapable, TargetError

if TYPE_CHECKING:
    from mlx_audit.models.checkpoint import Checkpoint

Model = Annotated[str, typer.Option("--model", help="A checkpoint folder, a .gguf file, or smollm2.")]
Prompt = Annotated[str, typer.Option("--prompt", help="What to say to the model; - reads stdin.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")]
Temp = Annotated[float, typer.Option("--temp", min=0.0, help="Temperature; 0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling, below 1.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=_choices.MOST_SEED, help="Of sampling.")]
Json = Annotated[bool, typer.Option("--json", help="Write one result as JSON to stdout, nothing else.")]


def generate(
    model: Model,
    prompt: Prompt,
    max_tokens: MaxTokens = 100,
    temp: Temp = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    json: Json = False,
) -> int:
    """Answer a prompt: compiled where a record proves it, else eagerly, with the reason on stderr."""
    path = _path(model)
    _note_stale(path, model)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise MlxAuditError("the prompt is empty", where="--prompt")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses PyTorch, which is not needed
    # What libraries print while they load must not mix with the answer.
    with contextlib.redirect_stdout(sys.stderr):
        checkpoint = _load(path)
        answer = _Answer(checkpoint, text, max_tokens)
        answer.prepare(temp, top_p, seed)
    for part in answer.parts():
        if not json:
            _console.answer(part)
    if json:
        _console.print_json({"model": model, **answer.to_dict()})
    else:
        print()
        _console.note(answer.summary())
    return 0


def _path(model: str) -> Path:
    from mlx_audit.models.target import resolve_target

    target = resolve_target(model)
    if target.folder is None:
        raise TargetError(
            "text needs a checkpoint", where=f"--model {model}", allowed="a folder, a .gguf file, or smollm2"
        )
    return target.folder


def _note_stale(path: Path, model: str) -> None:
    """Say it once, in this command line's own way, and not also as the session does."""
    import warnings

    from mlx_audit.cli._stamps import note_stale
    from mlx_audit.evidence.stamps import StaleStamp

    note_stale(path, model)
    warnings.simplefilter("ignore", StaleStamp)


def _load(path: Path) -> Checkpoint:
    from mlx_audit.evidence.environment import backend
    from mlx_audit.models.checkpoint import Checkpoint

    # On CPUs, matrices of half precision are many times slower.
    checkpoint = Checkpoint(path, dtype="float32" if backend() == "cpu" else "float16")
    if checkpoint.tokenizer is None:
        raise TargetError("the checkpoint has no tokenizer", where=str(path))
    return checkpoint


@dataclass
class _Answer:
    """One answer, and how long its parts took.

    Attributes:
        reason: Why decoding was eager; None when it was compiled.
        tokens: Generated so far, without the stop token.
    """

    checkpoint: Checkpoint
    text: str
    max_tokens: int
    reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    prompt: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokenizer: Any = None

    def prepare(self, temp: float, top_p: float, seed: int | None) -> None:
        """Read the prompt, and decide between compiled and eager decoding."""
        import mlx.core as mx
        from mlx_lm.sample_utils import make_sampler

        from mlx_audit.decode import CompiledDecodeSession
        from mlx_audit.models.checkpoint import chat_ids

        if seed is not None:
            mx.random.seed(seed)
        self.tokenizer = self.checkpoint.tokenizer
        self.prompt = chat_ids(self.tokenizer, [{"role": "user", "content": self.text}])
        self.sampler = make_sampler(temp, top_p=top_p)
        self.session: CompiledDecodeSession | None = None
        try:
            capacity = len(self.prompt) + self.max_tokens
            self.session = CompiledDecodeSession(self.checkpoint.model, capacity, records=_records())
        except NotCompileCapable as refusal:
            self.reason = str(refusal)
            _console.note(f"decoding eagerly: {refusal}")

    def parts(self) -> Iterator[str]:
        """Yield the text in pieces, as it comes."""
        detokenizer = self.tokenizer.detokenizer
        stop = self.tokenizer.eos_token_ids
        last = time.perf_counter()
        for token in self._compiled(stop) if self.session is not None else self._eager(stop):
            self.tokens.append(token)
            self.seconds.append(time.perf_counter() - last)
            detokenizer.add_token(token)
            yield detokenizer.last_segment
            last = time.perf_counter()
        detokenizer.finalize()
        self.finish_reason = "length" if len(self.tokens) == self.max_tokens else "stop"
        yield detokenizer.last_segment

    def _compiled(self, stop: Collection[int]) -> Iterator[int]:
        assert self.session is not None
        return self.session.generate(self.prompt, self.max_tokens, self.sampler, stop)

    def _eager(self, stop: Collection[int]) -> Iterator[int]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        model, prompt = self.checkpoint.model, mx.array(self.prompt)
        for step in generate_step(prompt, model, max_tokens=self.max_tokens, sampler=self.sampler):
            token = int(step[0])
            if token in stop:
                return
            yield token

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        session = self.session
        return {
            "text": self.tokenizer.decode(self.tokens),
            "tokens": self.tokens,
            "prompt_tokens": len(self.prompt),
            "finish_reason": self.finish_reason,
            "compiled": session is not None,
            "reason": self.reason,
            "capacity": session.capacity if session is not None else None,
            "traces": session.trace_count if session is not None else 0,
            "prefill_tokens_per_second": self._rate(len(self.prompt), self.seconds[:1]),
            "decode_tokens_per_second": self._rate(len(self.tokens) - 1, self.seconds[1:]),
        }

    def summary(self) -> str:
        """Return how fast it was, on one line."""
        facts = self.to_dict()
        how = f"compiled, traces: {facts['traces']}" if facts["compiled"] else "eager"
        rates = [
            f"{name} {count} tokens" + (f", {rate:.1f} tokens/s" if rate is not None else "")
            for name, count, rate in (
                ("prefill", len(self.prompt), facts["prefill_tokens_per_second"]),
                ("decode", len(self.tokens), facts["decode_tokens_per_second"]),
            )
        ]
        return f"{rates[0]}; {rates[1]} ({how})"

    @staticmethod
    def _rate(count: int, seconds: list[float]) -> float | None:
        total = sum(seconds)
        return round(count / total, 2) if total > 0 and count > 0 else None


def _records() -> Path | None:
    """Return the records of the working directory, which the command line reads, unless others are named."""
    here = Path("model_audits", "records")
    return here if not os.environ.get("MLX_AUDIT_RECORDS") and here.is_dir() else None
