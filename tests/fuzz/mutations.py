"""Inputs that nobody means well, grown from real ones: bytes cut and doubled, values put in wrong places of trees."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

DEEP = "@@deep@@"
TWICE = "@@twice@@"
"""Stand-ins that are no JSON values: nesting that is too deep, and a key that is there twice."""

FRAGMENTS = [
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\r",
        b"\t",
        b"\n",
        b"\xe2\x80\xa8",
        b"\x1b[2J",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"'",
        b"\\",
        b"- ",
        b"? ",
        b"&a ",
        b"*a",
        b"!!python/object ",
        b"---\n",
    ),
    *(
        b"<<: *a",
        b"%YAML 9.9\n",
        b"|\n",
        b">-\n",
        b"#",
        b"=",
        b"@",
        b"`",
        b"null",
        b"NaN",
        b"-Infinity",
        b"1e400",
    ),
    *(
        b"9" * 5000,
        b"-0",
        b"0x7f",
        b"1_000",
        b"2024-13-45",
        b"1:30",
        b"yes",
        b"~",
        b"a" * 70_000,
        b"[" * 2000,
    ),
    *(
        b"(" * 300,
        b"not " * 60,
        b"-" * 300,
        b"[0]" * 90,
        b"\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7",
        b"e\xcc\x81",
    ),
    *(b"\\ud800", b"\\u0000", b"<script>alert(1)</script>", b"]]>", b"../" * 20, b"::", b" # ", b"\xff" * 8),
    *(
        b"\x00\x00\x00\x00\x00\x00\x00\x80",
        b"\x01\x00\x00\x00",
        b"\x09\x00\x00\x00",
        b"lambda: ",
        b"*",
        b"async ",
    ),
    *(
        b"match x:\n case _:\n  ",
        b"while True:\n    ",
        b"self.",
        b"f'{x!r:{y}}'",
        b"@",
        b":=",
        b"def f(a, /, *b, **c): ...",
    ),
]

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        " ",
        "a",
        "a" * 5000,
        "\x00",
        "\ud800",
        "\u202e",
        "e\u0301",
        "\u00e9",
        "👩‍👩‍👧",
        "\x1b[31m",
        "a\nb",
        "]]>",
    ),
    *(
        "../../../etc/passwd",
        "/etc/passwd",
        "<script>alert(1)</script>",
        '"onload="',
        "{{7*7}}",
        "%s%n",
        "${x}",
        "|",
    ),
    *(
        "capable",
        "limited",
        "not-capable",
        "pass",
        "fail",
        "linear",
        "rotating",
        "i",
        "len(i)",
        "1 // 0",
        "0 - 1",
    ),
    *([], {}, [[]], [{}], {"a": {}}, {"": ""}, [None] * 500, [{}] * 500, {str(n): {} for n in range(500)}),
    *(
        DEEP,
        {TWICE: 1},
        {"__class__": "os.system"},
        [1, "1", 1.0, True],
        "9" * 5000,
        "mlx_lm.models.llama",
        "./x.py",
    ),
]

Edit = tuple[str, float, float, int]
EDITS: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "double", "flip", "cut", "many"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=4,
)
CHANGES: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "remove", "rename", "wrap", "add"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=3,
)


def of_bytes(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Real files with a few spans changed, and bytes of no meaning."""
    edited = st.builds(_edited, st.sampled_from(seeds), EDITS)
    return st.one_of(edited, edited, edited, st.binary(max_size=300))


def of_trees(seeds: Sequence[bytes], finish: Callable[[Any], Any] | None = None) -> st.SearchStrategy[bytes]:
    """JSON documents with a few values changed, and what `of_bytes` gives.

    Args:
        seeds: JSON documents.
        finish: Makes a changed document agree with itself again, so that deeper parts are reached.
    """
    trees = [json.loads(seed) for seed in seeds]

    def build(at: int, changes: list[Edit], finished: bool) -> bytes:
        tree = copy.deepcopy(trees[at])
        for change in changes:
            tree = _changed(tree, change)
        return _text(finish(tree) if finish is not None and finished else tree)

    changed = st.builds(build, st.integers(0, len(trees) - 1), CHANGES, st.booleans())
    return st.one_of(changed, changed, of_bytes(seeds))


def _edited(data: bytes, edits: list[Edit]) -> bytes:
    for what, start, end, pick in edits:
        first = int(start * (len(data) + 1))
        last = first + int(end * min(len(data) - first, 200))
        match what:
            case "insert":
                data = data[:first] + FRAGMENTS[pick % len(FRAGMENTS)] + data[first:]
            case "delete":
                data = data[:first] + data[last:]
            case "double":
                data = data[:last] + data[first:last] * (pick % 20) + data[last:]
            case "many":
                data = data[:first] + FRAGMENTS[pick % len(FRAGMENTS)] * 50 + data[first:]
            case "flip":
                data = data[:first] + bytes([pick % 256]) + data[first + 1 :]
            case "cut":
                data = data[:first]
    return data


def _changed(tree: Any, change: Edit) -> Any:
    what, where, _, pick = change
    spots = list(_spots(tree))
    value = copy.deepcopy(VALUES[pick % len(VALUES)])
    if not spots:
        return value
    holder, key = spots[int(where * len(spots))]
    match what:
        case "remove":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[value if isinstance(value, str) else f"x{pick}"] = holder.pop(key)
        case "wrap":
            holder[key] = [holder[key]] if pick % 2 else {"a": holder[key]}
        case "add" if isinstance(holder, dict):
            holder[f"x{pick}" if pick % 2 else "__proto__"] = value
        case "add":
            holder.insert(key, value)
        case _:
            holder[key] = value
    return tree


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        pairs = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, value in pairs:
            found.append((holder, key))
            if isinstance(value, dict | list):
                waiting.append(value)
    return found if isinstance(tree, dict | list) else []


def _text(tree: Any) -> bytes:
    text = json.dumps(tree) if not isinstance(tree, bytes) else tree.decode()
    text = text.replace(json.dumps(DEEP), "[" * 20_000 + "]" * 20_000)
    return text.replace(f'"{TWICE}": 1', '"k": 1, "k": 2').encode()
