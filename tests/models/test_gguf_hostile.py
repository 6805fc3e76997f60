"""Malformed GGUF files: each is refused by its header with a typed error, before MLX opens it, within little memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf_files as gf
from mlx_audit.errors import TargetError
from mlx_audit.models.gguf import GGUFError, read_gguf
from tiny_models import tiny_model

TRIAL = Path(__file__).parents[1] / "gguf_trial.py"
HUGE = (1 << 64) - 1
BIG = 1 << 40

Damage = Callable[[gf.Draft], bytes | None]


class Trial:
    """A process that reads files one by one; when a file kills it, `read` says so."""

    def __init__(self, mode: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(TRIAL), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
        assert self._line() == {"ready": True}

    def read(self, path: Path) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"exit {self._process.wait()}: {self._process.stderr.read()[-2000:]}")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def trial(mode: str) -> Iterator[Trial]:
    process = Trial(mode)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[Trial]:
    with trial("header") as process:
        yield process


@functools.cache
def _valid() -> gf.Draft:
    kinds = {"attn": gf.KIND_Q4_1, "token_embd": gf.KIND_Q8_0}
    model = tiny_model("llama", vocab_size=gf.VOCABULARY, num_hidden_layers=1, tie_word_embeddings=True)
    return gf.draft_of(model, kinds)


def valid() -> gf.Draft:
    return copy.deepcopy(_valid())


def metadata(**changes: tuple[int, bytes] | None) -> Damage:
    """Set or remove keys; `__` stands for a dot."""

    def damage(draft: gf.Draft) -> None:
        for name, value in changes.items():
            key = name.replace("__", ".")
            if value is None:
                del draft.metadata[key]
            else:
                draft.metadata[key] = value

    return damage


def tokenizer(**changes: tuple[int, bytes] | None) -> Damage:
    return metadata(**{f"tokenizer__ggml__{name}": value for name, value in changes.items()})


def llama(**changes: tuple[int, bytes] | None) -> Damage:
    return metadata(**{f"llama__{name}": value for name, value in changes.items()})


def tensor(
    name: str, *, shape: list[int] | None = None, kind: int | None = None, offset: int | None = None
) -> Damage:
    def damage(draft: gf.Draft) -> None:
        entry = draft.tensors[name]
        entry[0] = entry[0] if shape is None else shape
        entry[1] = entry[1] if kind is None else kind
        if offset is not None:
            draft.offsets[name] = offset

    return damage


def having(**changes: Any) -> Damage:
    def damage(draft: gf.Draft) -> None:
        for name, value in changes.items():
            setattr(draft, name, value)

    return damage


def renamed(old: str, new: str) -> Damage:
    def damage(draft: gf.Draft) -> None:
        draft.tensors = {new if name == old else name: entry for name, entry in draft.tensors.items()}

    return damage


def nested(depth: int, width: int) -> tuple[int, bytes]:
    data = struct.pack("<IQ", gf.U32, 0)
    for _ in range(depth):
        data = struct.pack("<IQ", gf.ARRAY, width) + data * width
    return gf.ARRAY, data


def tokens_of(*first: str) -> tuple[int, bytes]:
    names = [*first, *(f"t{i}" for i in range(gf.VOCABULARY - len(first)))]
    return gf.strings(names)


TYPES = [1] * gf.VOCABULARY
TWICE = gf.text("general.name") + struct.pack("<I", gf.U8) + b"\1"
COPY = gf.text("output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)

HOSTILE: dict[str, tuple[str, Damage]] = {
    # the frame
    "empty": ("not a GGUF file", lambda draft: b""),
    "three bytes": ("not a GGUF file", lambda draft: b"GGU"),
    "another format": ("not a GGUF file", having(magic=b"GGML")),
    "only magic": ("ends within the version", lambda draft: b"GGUF"),
    "version 1": ("unknown version", having(version=1)),
    "version 4": ("unknown version", having(version=4)),
    "big-endian": ("big-endian", having(version=3 << 24)),
    "zeros after the magic": ("unknown version", lambda draft: b"GGUF" + b"\0" * 4096),
    "more keys than bytes": ("more metadata keys", having(counts={"metadata": HUGE})),
    "more keys than memory": ("more metadata keys", having(counts={"metadata": BIG})),
    "more tensors than bytes": ("more tensors", having(counts={"tensors": HUGE})),
    "one key too few": ("", lambda draft: having(counts={"metadata": len(draft.metadata) - 1})(draft)),
    "one key too many": ("", lambda draft: having(counts={"metadata": len(draft.metadata) + 1})(draft)),
    "one tensor too few": (
        "a tensor is missing",
        lambda d: having(counts={"tensors": len(d.tensors) - 1})(d),
    ),
    "one tensor too many": ("", lambda d: having(counts={"tensors": len(d.tensors) + 1})(d)),
    "no tensors": ("", having(tensors={})),
    "no metadata": ("a metadata key is missing", having(metadata={})),
    # values
    "huge string": ("too long", metadata(general__name=(gf.STRING, struct.pack("<Q", HUGE) + b"x"))),
    "string past the end": ("too long", metadata(general__name=(gf.STRING, struct.pack("<Q", BIG)))),
    "string over its bound": ("too long", metadata(general__name=gf.string(b"x" * ((1 << 20) + 1)))),
    "string not UTF-8": ("not UTF-8", metadata(general__name=gf.string(b"ok \xff\xfe"))),
    "string with a surrogate": ("not UTF-8", metadata(general__name=gf.string(b"\xed\xa0\x80"))),
    "key not UTF-8": (
        "not UTF-8",
        having(counts={"metadata": 1}, metadata={}, more_metadata=gf.text(b"\x80")),
    ),
    "empty key": ("empty metadata key", having(metadata={"": gf.u32(1)})),
    "huge key": ("too long", having(metadata={"k" * 70_000: gf.u32(1)})),
    "key twice": (
        "duplicate metadata key",
        lambda draft: having(
            metadata={"general.name": gf.string("a")}, more_metadata=TWICE, counts={"metadata": 2}
        )(draft),
    ),
    "unknown type": ("unknown type", metadata(general__name=(13, b"\0" * 8))),
    "huge type": ("unknown type", metadata(general__name=(0xFFFFFFFF, b"\0" * 8))),
    "float64, which mx.load misreads": ("float64", metadata(general__name=(gf.F64, struct.pack("<d", 1.5)))),
    "float64 items": ("float64", metadata(general__name=gf.array(gf.F64, 1, b"\0" * 8))),
    "bool of 2": ("no bool", metadata(general__name=(gf.BOOL, b"\2"))),
    "bool items of 7": ("no bool", metadata(general__name=gf.array(gf.BOOL, 2, b"\1\7"))),
    "huge array": ("more items", metadata(general__name=gf.array(gf.U32, HUGE, b""))),
    "array past the end": ("more items", metadata(general__name=gf.array(gf.U8, BIG, b""))),
    "array that overflows": (
        "more items",
        metadata(general__name=gf.array(gf.U64, (1 << 61) + 1, b"\0" * 8)),
    ),
    "array over its bound": (
        "more items",
        metadata(general__name=gf.array(gf.U8, (1 << 20) + 1, b"\0" * (2 << 20))),
    ),
    "array of an unknown type": ("unknown type", metadata(general__name=gf.array(99, 1, b"\0" * 8))),
    "strings past the end": ("more items", metadata(general__name=gf.array(gf.STRING, BIG, b""))),
    "a string too long in an array": (
        "too long",
        metadata(general__name=gf.array(gf.STRING, 2, gf.text("a") + struct.pack("<Q", HUGE))),
    ),
    "nested arrays": ("array of arrays", metadata(general__name=nested(1, 1))),
    "deeply nested arrays": ("array of arrays", metadata(general__name=nested(100_000, 1))),
    "a bomb of nested arrays": ("array of arrays", metadata(general__name=nested(14, 2))),
    "an array that holds its own header again": (
        "array of arrays",
        metadata(general__name=gf.array(gf.ARRAY, HUGE, struct.pack("<IQ", gf.ARRAY, HUGE) * 64)),
    ),
    # tensors
    "tensor twice": (
        "duplicate tensor name",
        lambda draft: having(more_tensors=COPY, counts={"tensors": len(draft.tensors) + 1})(draft),
    ),
    "tensor without a name": ("empty tensor name", renamed("output_norm.weight", "")),
    "tensor with a long name": ("too long", renamed("output_norm.weight", "x" * 65)),
    "no dimension": ("wrong rank", tensor("output_norm.weight", shape=[])),
    "five dimensions": ("wrong rank", tensor("output_norm.weight", shape=[32, 1, 1, 1, 1])),
    "dimension 0": ("wrong dimension", tensor("output_norm.weight", shape=[0])),
    "dimension 2^64 - 1": ("wrong dimension", tensor("output_norm.weight", shape=[HUGE])),
    "dimension 2^31": ("wrong dimension", tensor("output_norm.weight", shape=[1 << 31])),
    "dimensions whose product overflows": (
        "outside the file",
        tensor("output_norm.weight", shape=[1 << 30] * 4),
    ),
    "unknown encoding": ("encoding that is not read", tensor("token_embd.weight", kind=200)),
    "Q5_0, which mx.load refuses": ("encoding that is not read", tensor("token_embd.weight", kind=6)),
    "Q4_K, which mx.load misreads": ("encoding that is not read", tensor("token_embd.weight", kind=12)),
    "integers for weights": ("encoding that is not read", tensor("output_norm.weight", kind=26)),
    "rows that are no whole blocks": ("no whole blocks", tensor("blk.0.attn_q.weight", shape=[16, 64])),
    "misaligned": ("misaligned", tensor("output_norm.weight", offset=4)),
    "data past the end": ("outside the file", tensor("output_norm.weight", offset=BIG)),
    "an offset that wraps round into the header": (
        "outside the file",
        tensor("output_norm.weight", offset=HUGE - 31),
    ),
    "overlapping data": ("overlap", lambda draft: tensor(list(draft.tensors)[3], offset=0)(draft)),
    "all tensors share their data": ("overlap", lambda d: having(offsets=dict.fromkeys(d.tensors, 0))(d)),
    "alignment 0": ("wrong alignment", metadata(general__alignment=gf.u32(0))),
    "alignment 24": ("wrong alignment", metadata(general__alignment=gf.u32(24))),
    "alignment 2^31": ("wrong alignment", metadata(general__alignment=gf.u32(1 << 31))),
    "alignment as text": ("wrong alignment", metadata(general__alignment=gf.string("32"))),
    "alignment other than the data's": ("", metadata(general__alignment=gf.u32(4096))),
    "a tensor too many": (
        "no place in the model",
        lambda d: d.tensors.update({"extra.weight": [[4], 0, b"\0" * 16]}),
    ),
    "an embedding of another shape": (
        "shape contradicts",
        tensor("token_embd.weight", shape=[64, gf.VOCABULARY // 2]),
    ),
    "transposed": ("shape contradicts", tensor("blk.0.ffn_up.weight", shape=[64, 32])),
    "a quantized norm": ("quantized", tensor("output_norm.weight", kind=gf.KIND_Q4_1)),
    "a bias on one of four": (
        "a tensor is missing",
        lambda d: d.tensors.update({"blk.0.attn_q.bias": [[32], 0, b"\0" * 128]}),
    ),
    # what the model is
    "no architecture": ("key is missing", metadata(general__architecture=None)),
    "another architecture": ("unknown architecture", metadata(general__architecture=gf.string("mamba"))),
    "architecture as a number": ("wrong value", metadata(general__architecture=gf.u32(1))),
    "an adapter": ("contradicts", metadata(general__type=gf.string("adapter"))),
    "one part of several": ("one part of several", metadata(split__count=gf.u32(2))),
    "experts": ("contradicts", llama(expert_count=gf.u32(8))),
    "a setting that is not known": ("does not have", llama(logit_scale=gf.f32(2))),
    "no width": ("key is missing", llama(embedding_length=None)),
    "width 0": ("wrong value", llama(embedding_length=gf.u32(0))),
    "width as text": ("wrong value", llama(embedding_length=gf.string("32"))),
    "width as a float": ("wrong value", llama(embedding_length=gf.f32(32))),
    "width as a bool": ("wrong value", llama(embedding_length=gf.flag(True))),
    "absurd width": ("wrong value", llama(embedding_length=gf.u32(0xFFFFFFFF))),
    "no layers": ("wrong value", llama(block_count=gf.u32(0))),
    "absurdly many layers": ("wrong value", llama(block_count=gf.u32(1 << 31))),
    "one layer too many": ("a tensor is missing", llama(block_count=gf.u32(2))),
    "heads that don't divide the width": ("don't divide", llama(attention__head_count=gf.u32(6))),
    "no heads": ("wrong value", llama(attention__head_count=gf.u32(0))),
    "heads a layer": ("wrong value", llama(attention__head_count=gf.ints([4]))),
    "key heads that don't divide the heads": ("evenly", llama(attention__head_count_kv=gf.u32(3))),
    "more key heads than heads": ("evenly", llama(attention__head_count_kv=gf.u32(8))),
    "other heads than the tensors": ("shape contradicts", llama(attention__head_count_kv=gf.u32(4))),
    "odd head width": ("wrong head width", llama(attention__key_length=gf.u32(7))),
    "values wider than keys": ("contradicts", llama(attention__value_length=gf.u32(16))),
    "partial RoPE": ("contradicts", llama(rope__dimension_count=gf.u32(4))),
    "RoPE base NaN": ("wrong value", llama(rope__freq_base=gf.f32(float("nan")))),
    "RoPE base infinite": ("wrong value", llama(rope__freq_base=gf.f32(float("inf")))),
    "epsilon below 0": ("wrong value", llama(attention__layer_norm_rms_epsilon=gf.f32(-1))),
    "no epsilon": ("key is missing", llama(attention__layer_norm_rms_epsilon=None)),
    "YaRN": ("RoPE scaling", llama(rope__scaling__type=gf.string("yarn"))),
    "linear scaling by 0": (
        "wrong value",
        llama(rope__scaling__type=gf.string("linear"), rope__scaling__factor=gf.f32(0)),
    ),
    "RoPE factors": ("RoPE factors", lambda d: d.tensors.update({"rope_freqs.weight": [[4], 0, b"\0" * 16]})),
    "absurd vocabulary": ("contradicts", llama(vocab_size=gf.u32(0xFFFFFFFF))),
    # the tokenizer
    "no tokens": ("key is missing", tokenizer(tokens=None)),
    "no token at all": ("", tokenizer(tokens=gf.strings([]))),
    "tokens as numbers": ("wrong value", tokenizer(tokens=gf.ints(TYPES))),
    "a token too few": ("shape contradicts", tokenizer(tokens=gf.strings(gf.byte_tokens()))),
    "two equal tokens": ("same text", tokenizer(tokens=tokens_of("a", "a"))),
    "an endless token": ("a token is too long", tokenizer(tokens=tokens_of("a" * 5000))),
    "no token types": ("key is missing", tokenizer(token_type=None)),
    "token types of another count": ("wrong value", tokenizer(token_type=gf.ints(TYPES[1:]))),
    "an unknown token type": ("no known type", tokenizer(token_type=gf.ints([9] + TYPES[1:]))),
    "no merges": ("key is missing", tokenizer(merges=None)),
    "a merge without a space": ("merge 0", tokenizer(merges=gf.strings(["he"]))),
    "a merge of unknown tokens": ("merge 1", tokenizer(merges=gf.strings(["h e", "z z"]))),
    "an unknown tokenizer": ("unknown tokenizer", tokenizer(model=gf.string("rwkv"))),
    "an unknown way to split": ("unknown way", tokenizer(pre=gf.string("default"))),
    "SentencePiece without scores": ("key is missing", tokenizer(model=gf.string("llama"))),
    "scores that are no numbers": (
        "not a number",
        tokenizer(model=gf.string("llama"), scores=gf.floats([float("nan")] * gf.VOCABULARY)),
    ),
    "an end beyond the vocabulary": ("wrong value", tokenizer(eos_token_id=gf.u32(gf.VOCABULARY))),
    "a start to add that is not named": (
        "not named",
        tokenizer(add_bos_token=gf.flag(True), bos_token_id=None),
    ),
    "a chat template as a number": ("wrong value", metadata(tokenizer__chat_template=gf.u32(1))),
}


@pytest.mark.xdist_group("gguf_hostile")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, reader: Trial, tmp_path: Path) -> None:
    says, damage = HOSTILE[name]
    draft = valid()
    data = damage(draft)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(draft.build() if data is None else data)
    check(reader.read(path), path, says)


def check(result: dict[str, Any], path: Path, says: str = "") -> None:
    assert result["kind"] == "GGUFError", result
    assert says in result["text"]
    assert result["where"].startswith(str(path))
    assert result["fix"]
    assert len(result["text"]) < 1000
    assert result["grown"] < 64 << 20
    assert result["seconds"] < 5


@pytest.mark.xdist_group("gguf_hostile")
def test_files_cut_anywhere_in_the_header_are_refused(reader: Trial, tmp_path: Path) -> None:
    draft = valid()
    whole = draft.build()
    cuts = {cut + step for cut in draft.marks for step in (-1, 0, 1)} | {len(whole) - 1, len(whole) // 2}
    assert len(cuts) > 200
    path = tmp_path / "cut.gguf"
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        check(reader.read(path), path)
    path.write_bytes(whole)
    assert reader.read(path)["kind"] == "model"


@pytest.mark.xdist_group("gguf_hostile")
def test_large_files_of_nothing_take_little_memory(reader: Trial, tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1 << 19, 1 << 19)
    for start in (
        head,
        head + gf.text("k") + struct.pack("<I", gf.STRING),
        head[:8] + struct.pack("<QQ", 0, 1),
    ):
        with path.open("wb") as file:
            file.write(start)
            file.truncate(1 << 36)
        check(reader.read(path), path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, tmp_path / "missing.gguf", fifo):
        with pytest.raises(GGUFError) as caught:
            read_gguf(path)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, TargetError)


def test_errors_say_where_and_what(tmp_path: Path) -> None:
    draft = valid()
    llama(attention__head_count_kv=gf.u32(3))(draft)
    path = tmp_path / "model.gguf"
    path.write_bytes(draft.build())
    with pytest.raises(GGUFError) as caught:
        read_gguf(path)
    at = path.read_bytes().index(b"llama.attention.head_count_kv") + len("llama.attention.head_count_kv") + 4
    assert caught.value.where == f"{path}: llama.attention.head_count_kv, byte {at}"
    assert (caught.value.found, caught.value.allowed) == (3, "a divisor of 4")
    assert caught.value.fix


FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=6)


@pytest.mark.xdist_group("gguf_hostile")
def test_flipped_bytes_give_a_model_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    draft = valid()
    whole, path = draft.build(), tmp_path_factory.mktemp("fuzz") / "flipped.gguf"
    header = draft.marks[-1]
    kinds: set[str] = set()
    with trial("model") as process:

        @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
        @given(flips=FLIPS, within=st.sampled_from([64, header, header, len(whole)]))
        def fuzz(flips: list[tuple[float, int]], within: int) -> None:
            data = bytearray(whole)
            for place, mask in flips:
                data[int(place * within)] ^= mask
            path.write_bytes(data)
            result = process.read(path)
            kinds.add(result["kind"])
            assert result["kind"] in ("model", "GGUFError"), result

        fuzz()
    assert kinds == {"model", "GGUFError"}
