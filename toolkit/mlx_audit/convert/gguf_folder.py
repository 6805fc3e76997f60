"""In the child: a GGUF file as a folder that mlx-lm loads, with the same ids, text and stop tokens."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import dequantize_model, quantize_model, save_config, save_model

from mlx_audit.convert.folder import require_loads
from mlx_audit.convert.options import ConvertOptions
from mlx_audit.convert.order import ConversionFailed, Order
from mlx_audit.models.build import DTYPES
from mlx_audit.models.checkpoint import Checkpoint, text_of
from mlx_audit.models.gguf import read_gguf

_TEXTS = (
    "It was the best of times, it was the worst of times.",
    "  two  spaces,\ttab,\r\n\n new lines  ",
    "def f(x):\n    return x ** 2  # 12345678901 + 3.14e-5",
    "Ça va? Ærøskøbing, Straße, ½ λόγος, Москва, 東京タワー, 서울, שלום, مرحبا, नमस्ते",
    "🙂👩‍👩‍👧‍👦 … “quotes” — don't we'll I'VE",
    "",
    " ",
    "hello hello HELLO héllo",
)
"""What both tokenizers must cut alike."""

_MOST_SECONDS = 120
"""For comparing the tokenizers; a chat template can loop for as long as it likes."""


def write_folder(order: Order) -> list[str]:
    """Write the folder, and return what there is to say of it.

    Raises:
        GGUFError: the file cannot be read.
        ConversionFailed: mlx-lm would read the folder's tokenizer otherwise than the file's.
    """
    checkpoint = read_gguf(order.source)
    options = order.options
    dtype = options.dtype or "float32"
    config: dict[str, Any] = {**checkpoint.config, "torch_dtype": dtype}
    if stops := sorted(checkpoint.vocabulary.stops):
        config["eos_token_id"] = stops
    model = checkpoint.load_model(lazy=True, dtype=dtype)
    notes = []
    if options.quantize or options.dequantize:
        if config.pop("quantization", None) is not None:
            model = dequantize_model(model)
            notes = ["the file's weights were quantized already: they are rounded twice"] * options.quantize
        model.set_dtype(DTYPES[dtype])
    if options.quantize:
        model, config = quantize_model(
            model,
            config,
            options.q_group_size,
            options.q_bits,
            mode=options.q_mode,
            quant_predicate=_recipe(options, model),
        )
    save_model(order.made, model, donate_model=True)
    save_config(config, order.made / "config.json")
    tokenizer = checkpoint.load_tokenizer()
    tokenizer.save_pretrained(str(order.made))
    require_loads(order.made)
    with _at_most(_MOST_SECONDS):
        _require_same(tokenizer, Checkpoint(order.made).tokenizer, order)
    return notes


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"comparing the tokenizers takes more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _recipe(options: ConvertOptions, model: nn.Module) -> Any:
    if options.quant_predicate is None:
        return None
    return mixed_quant_predicate_builder(options.quant_predicate, model, options.q_group_size or 64)


def _require_same(ours: Any, theirs: Any, order: Order) -> None:
    """Refuse a folder whose tokenizer mlx-lm reads otherwise: a wrong id or stop token shows in no number."""
    size = len(ours.get_vocab())
    names = ours.convert_ids_to_tokens(list(range(size)))
    texts = [*_TEXTS, *(f"a {token}b" for token in ours.all_special_tokens)]
    questions = (
        ("the vocabulary", lambda t: (t.convert_ids_to_tokens(list(range(size))), len(t.get_vocab()))),
        ("the stop tokens", lambda t: sorted(t.eos_token_ids)),
        ("how texts are cut", lambda t: [_pieces(t, text) for text in texts]),
        ("the ids of texts", lambda t: [list(t.encode(text)) for text in texts]),
        ("the text of ids", lambda t: [text_of(t, list(ours.encode(text))) for text in texts]),
        ("the chat template", _chat),
    )
    assert names, "a vocabulary has tokens"
    for what, answer in questions:
        if (wanted := answer(ours)) != (found := answer(theirs)):
            raise ConversionFailed(
                f"mlx-lm reads {what} of the folder otherwise than of the file",
                where=order.text,
                found=_first_difference(found, wanted),
            )


def _pieces(tokenizer: Any, text: str) -> Any:
    """Return the pieces that are merged within: another way to cut shows here with any vocabulary."""
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return text if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)


def _chat(tokenizer: Any) -> Any:
    if not tokenizer.has_chat_template:
        return None
    messages = [{"role": "user", "content": "Which river?"}, {"role": "assistant", "content": "The Seine."}]
    try:
        return list(tokenizer.apply_chat_template([*messages, messages[0]], add_generation_prompt=True))
    except TimeoutError:
        raise
    except Exception as error:  # the template's own refusal, which must be the same
        return f"{type(error).__name__}: {error}"


def _first_difference(found: Any, wanted: Any) -> str:
    if isinstance(found, list) and isinstance(wanted, list):
        pair = next(
            ((f, w) for f, w in zip(found, wanted, strict=False) if f != w), (found[-1:], wanted[-1:])
        )
        return f"{pair[0]!r}, in the file {pair[1]!r}"
    return f"{found!r}, in the file {wanted!r}"
