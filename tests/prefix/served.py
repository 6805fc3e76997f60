"""mlx-lm's own server, in this process, on a tiny model whose tokens are letters."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx_lm.server as server
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefix_models import VOCABULARY, subject

NAME = "tiny"
_FIRST = 0x4E00


def as_text(tokens: Sequence[int]) -> str:
    """Return the letters of token ids."""
    return "".join(chr(_FIRST + token) for token in tokens)


def tokenizer() -> TokenizerWrapper:
    """Return a tokenizer that maps each letter to one id, without an end of text."""
    vocabulary = {chr(_FIRST + token): token for token in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(_FIRST)))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    inner = PreTrainedTokenizerFast(tokenizer_object=core)
    return TokenizerWrapper(inner, NaiveStreamingDetokenizer, eos_token_ids=[VOCABULARY + 1])


class Provider(server.ModelProvider):
    """Gives mlx-lm's server a model that lies in no folder."""

    def _load(self, model_path: str, adapter_path: Any = None, draft_model_path: Any = None) -> None:
        self.model_key = (model_path, adapter_path, draft_model_path)
        self.model = subject(self.cli_args.family)
        self.tokenizer = tokenizer()
        self.draft_model = None
        self.is_batchable = all(hasattr(cache, "merge") for cache in server.make_prompt_cache(self.model))


def options(family: str, **changes: Any) -> argparse.Namespace:
    """Return the server's options, as its command line would give them."""
    given = {
        "family": family,
        "model": NAME,
        "adapter_path": None,
        "draft_model": None,
        "trust_remote_code": False,
        "chat_template": None,
        "use_default_chat_template": False,
        "chat_template_args": {},
        "pipeline": False,
        "decode_concurrency": 4,
        "prompt_concurrency": 4,
        "prefill_step_size": 8,
        "prompt_cache_size": 10,
        "prompt_cache_bytes": None,
        "kv_bits": None,
        "kv_group_size": 64,
        "quantized_kv_start": 0,
        "num_draft_tokens": 3,
    }
    return argparse.Namespace(**{**given, **changes})


class Served:
    """A running generation thread; `ask` is what the HTTP handler does."""

    def __init__(self, generator: server.ResponseGenerator) -> None:
        self.generator = generator

    def ask(self, prompt: Sequence[int], count: int = 6, seed: int | None = None) -> tuple[list[int], int]:
        """Return the greedy answer and how many tokens of the prompt were cached; a seed: served one by one."""
        request = server.CompletionRequest("text", as_text(prompt), [], None, None)
        arguments = server.GenerationArguments(
            model=server.ModelDescription(NAME, None, None),
            sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
            logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=count,
            num_draft_tokens=0,
            logprobs=False,
            top_logprobs=0,
            seed=seed,
            chat_template_kwargs=None,
        )
        context, answers = self.generator.generate(request, arguments)
        answer = [answer.token for answer in answers]
        assert list(context.prompt) == list(prompt)
        return answer, context.prompt_cache_count


@contextmanager
def serving(family: str, cache: Any, **changes: Any) -> Iterator[Served]:
    """Run the server's generation thread with a prompt cache, and stop it at the end."""
    generator = server.ResponseGenerator(Provider(options(family, **changes)), cache)
    try:
        yield Served(generator)
    finally:
        generator.stop_and_join()
