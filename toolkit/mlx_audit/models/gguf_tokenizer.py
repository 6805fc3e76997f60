"""The tokenizer that a GGUF file carries, rebuilt with the `tokenizers` library.

Two kinds are read: byte-level BPE (`gpt2`), whose way to split text before merging is named by `tokenizer.ggml.pre`,
and SentencePiece BPE (`llama`), whose merges follow from the pieces' scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_audit.models.gguf_config import Facts
from mlx_audit.models.gguf_format import GGUFError, Header, shorten
from mlx_audit.models.modules import defer_mlx_lm

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKEN = 1024
"""Characters of a token; the longest in use are runs of 128 to 256 spaces."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "</s>"),
}
"""Control tokens that end a generation in llama.cpp, whatever the metadata name as end of sequence."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": "words",
    "smollm": "digits, words",
    "starcoder": "digits, words",
    "qwen2": _QWEN2.replace("{1,DIGITS}", ""),
    "deepseek-r1-qwen": _QWEN2.replace("{1,DIGITS}", ""),
    "llama-bpe": _QWEN2.replace("DIGITS", "3"),
    "llama3": _QWEN2.replace("DIGITS", "3"),
}
"""How each `tokenizer.ggml.pre` splits text: GPT-2's words, single digits first, or a regular expression."""
_LLAMA3 = ("llama-bpe", "llama3")


@dataclass(frozen=True)
class Vocabulary:
    """The checked `tokenizer.ggml.*` metadata.

    Attributes:
        kind: `gpt2` or `llama`.
        pre: How text is split, for `gpt2`.
        tokens: Texts by id.
        types: What each one is.
        merges: Pairs in order of rank, for `gpt2`.
        scores: A score a token, for `llama`.
        special: Ids of `bos`, `eos`, `unknown`, `padding`, `eot`, `eom`, where the file names them.
        add_bos, add_eos: Whether encoding adds these.
        space_prefix: Whether a space is put before the text, for `llama`.
        template: The chat template, a Jinja text, or None.
    """

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    scores: list[float]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    template: str | None

    @property
    def stops(self) -> set[int]:
        """Ids that end a generation."""
        named = {self.special[name] for name in ("eos", "eot", "eom") if name in self.special}
        return named | {
            token
            for token, text in enumerate(self.tokens)
            if text in _ENDS and self.types[token] in (CONTROL, USER_DEFINED)
        }


def read_vocabulary(header: Header) -> Vocabulary:
    """Return the tokenizer's metadata, checked.

    Raises:
        GGUFError: a key is missing or wrong, or contradicts another one.
    """
    facts = Facts(header)
    kind = facts.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise header.error(
            "unknown tokenizer", "tokenizer.ggml.model", found=shorten(kind), allowed="gpt2, llama"
        )
    pre = facts.text("tokenizer.ggml.pre") if kind == "gpt2" else ""
    if kind == "gpt2" and pre not in _SPLITS:
        raise header.error(
            "unknown way to split text", "tokenizer.ggml.pre", found=shorten(pre), allowed=", ".join(_SPLITS)
        )
    tokens: list[str] = facts.items("tokenizer.ggml.tokens", "string")
    known = set(tokens)
    if len(known) != len(tokens) or max(map(len, tokens)) > MAX_TOKEN:
        twice = len(known) != len(tokens)
        raise header.error(
            "two tokens have the same text" if twice else "a token is too long",
            "tokenizer.ggml.tokens",
            found=f"{len(known)} different of {len(tokens)}" if twice else max(map(len, tokens)),
            allowed=None if twice else f"{MAX_TOKEN} characters",
        )
    types: list[int] = facts.items("tokenizer.ggml.token_type", "int32", len(tokens))
    for token, of_type in enumerate(types):
        if not NORMAL <= of_type <= BYTE:
            raise header.error(
                f"token {token} is of no known type",
                "tokenizer.ggml.token_type",
                found=of_type,
                allowed="1 to 6",
            )
    special = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        if facts.has(key := f"tokenizer.ggml.{name}_token_id"):
            special[name] = facts.whole(key, low=0, high=len(tokens) - 1)
    spm = kind == "llama"
    add_bos = facts.flag("tokenizer.ggml.add_bos_token", spm or pre in _LLAMA3)
    add_eos = facts.flag("tokenizer.ggml.add_eos_token", False)
    for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
        if wanted and name not in special:
            raise header.error(
                "the token to add is not named",
                f"tokenizer.ggml.{name}_token_id",
                fix=f"name it, or set add_{name}_token to false",
            )
    template = "tokenizer.chat_template"
    return Vocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[] if spm else _merges(facts, known),
        scores=_scores(facts, len(tokens)) if spm else [],
        special=special,
        add_bos=add_bos,
        add_eos=add_eos,
        space_prefix=spm and facts.flag("tokenizer.ggml.add_space_prefix", True),
        template=facts.text(template) if facts.has(template) else None,
    )


def build_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return mlx-lm's wrapper around the tokenizer, with its chat template, stop tokens and streaming detokenizer."""
    defer_mlx_lm()
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    fast_class: Any = PreTrainedTokenizerFast  # not typed
    fast = fast_class(
        tokenizer_object=_tokenizer(vocabulary),
        clean_up_tokenization_spaces=False,
        **{named[k]: vocabulary.tokens[token] for k, token in vocabulary.special.items() if k in named},
    )
    fast.chat_template = vocabulary.template
    detokenizer = (
        BPEStreamingDetokenizer
        if vocabulary.kind == "gpt2"
        else functools.partial(SPMStreamingDetokenizer, trim_space=vocabulary.space_prefix)
    )
    return TokenizerWrapper(fast, detokenizer, eos_token_ids=sorted(vocabulary.stops))


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    if vocabulary.kind == "gpt2":
        ignore = vocabulary.pre in _LLAMA3
        tokenizer = Tokenizer(models.BPE(ids, vocabulary.merges, fuse_unk=False, ignore_merges=ignore))
        split = _SPLITS[vocabulary.pre]
        steps: list[Any] = [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.endswith("words"))
        ]
        if split.startswith("digits"):
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        elif split != "words":
            steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if "qwen" in vocabulary.pre:
            tokenizer.normalizer = (
                normalizers.NFC()
            )  # as the published tokenizer, though llama.cpp leaves it out
        tokenizer.decoder = decoders.ByteLevel()
    else:
        unknown = vocabulary.special.get("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                ids,
                _pairs(vocabulary, ids),
                unk_token=None if unknown is None else vocabulary.tokens[unknown],
                fuse_unk=True,
                byte_fallback=BYTE in vocabulary.types,
            )
        )
        prepend = [normalizers.Prepend("▁")] if vocabulary.space_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    tokenizer.add_tokens(
        [
            AddedToken(text, special=of_type == CONTROL, normalized=False)
            for text, of_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if of_type in (CONTROL, USER_DEFINED) and text
        ]
    )
    if vocabulary.add_bos or vocabulary.add_eos:
        around = [
            (vocabulary.tokens[vocabulary.special[name]], vocabulary.special[name]) if wanted else None
            for name, wanted in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos))
        ]
        first, last = ([end[0]] if end else [] for end in around)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[end for end in around if end],
        )
    return tokenizer


def _merges(facts: Facts, known: set[str]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    pairs = []
    for rank, merge in enumerate(facts.items(key, "string")):
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 1 or not {left, right, left + right} <= known:
            raise facts.header.error(
                f"merge {rank} joins what is not in the vocabulary",
                key,
                found=shorten(repr(merge)),
                allowed="two tokens and a space between, whose union is a token",
            )
        pairs.append((left, right))
    return pairs


def _scores(facts: Facts, count: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    scores: list[float] = facts.items(key, "float32", count)
    if any(score != score for score in scores):
        raise facts.header.error("a score is not a number", key)
    return scores


def _pairs(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's scores amount to: the best-scored piece is joined first."""
    order = sorted(range(len(ids)), key=lambda token: -vocabulary.scores[token])
    pairs = []
    for token in order:
        text = vocabulary.tokens[token]
        if vocabulary.types[token] in (NORMAL, USER_DEFINED):
            halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            pairs += [(left, right) for left, right in halves if left in ids and right in ids]
    return pairs


def checked_tokenizer(header: Header, vocabulary: Vocabulary) -> Any:
    """Return `build_tokenizer`, where what the libraries refuse is an error about the file.

    Raises:
        GGUFError: a library refused the vocabulary or the chat template.
    """
    try:
        return build_tokenizer(vocabulary)
    except Exception as error:
        raise GGUFError(
            "the tokenizer cannot be built",
            where=f"{header.path}: tokenizer.ggml.*",
            found=shorten(f"{type(error).__name__}: {error}"),
            fix="convert the model again with a current llama.cpp",
        ) from error
