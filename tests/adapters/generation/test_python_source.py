"""Expressions of manifests as Python: they mean the same, and nothing of a manifest becomes code."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.adapters.generation import render_adapter
from mlx_audit.adapters.generation.layout import WIDTH, header, statement
from mlx_audit.adapters.generation.python_source import attribute_path, tokens_of
from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import load_manifest
from mlx_audit.manifests.evaluation import evaluate
from mlx_audit.manifests.expressions import MAX_LENGTH, parse
from mlx_audit.manifests.syntax import ExpressionError

NAMES: dict[str, Any] = {
    "n": 8,
    "kinds": ["full", "sliding", "full", "sliding"],
    "scaling": {"factor": 4},
    "tied": True,
    "missing": None,
    "i": 3,
}


def text_of(expression: str) -> str:
    return "".join(token.text for token in tokens_of(parse(expression)))


@pytest.mark.parametrize(
    ("expression", "python"),
    [
        ("n", "args.n"),
        ("i", "i"),
        ("'a' == kinds[i]", '"a" == args.kinds[i]'),
        ("kinds == none", "args.kinds is None"),
        ("none != kinds", "args.kinds is not None"),
        ("not (kinds == none)", "args.kinds is not None"),
        ("tied == true", "args.tied is True"),
        ("not (i in kinds)", "i not in args.kinds"),
        ("not not tied", "args.tied"),
        ("not (n < 3 or tied)", "not (args.n < 3 or args.tied)"),
        ("(n - 1) - (i - 2)", "args.n - 1 - (i - 2)"),
        ("(n + 1) % (i // 2)", "(args.n + 1) % (i // 2)"),
        ("-(n + 1)", "-(args.n + 1)"),
        ("(n + 1 < 3) == tied", "(args.n + 1 < 3) == args.tied"),
        ("tied and (n < 3 or i > 1)", "args.tied and (args.n < 3 or i > 1)"),
        ("tied and n < 3 or i > 1", "args.tied and args.n < 3 or i > 1"),
        ("kinds[n - 1]", "args.kinds[args.n - 1]"),
        ("scaling['factor']", 'args.scaling["factor"]'),
        ("i in [1, -2, 'x', none]", 'i in [1, -2, "x", None]'),
        ("kinds[2 + 3 - len('ab')]", "args.kinds[3]"),
        ("1 == 1", "True"),
        ("n == -1", "args.n == -1"),
    ],
)
def test_expressions_as_python(expression: str, python: str) -> None:
    assert text_of(expression) == python


_INTEGERS = st.recursive(
    st.sampled_from(["n", "i", "0", "3", "-2", "len(kinds)", "scaling['factor']"]),
    lambda inner: st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(["+", "-", "//", "%"]), inner),
        st.builds("({})".format, inner),
        st.builds("-({})".format, inner),
        st.builds("len('abc') - {}".format, inner),
    ),
    max_leaves=5,
)
_COMPARED = st.one_of(
    st.builds("{} {} {}".format, _INTEGERS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), _INTEGERS),
    st.builds("kinds[i] {} 'full'".format, st.sampled_from(["==", "!=", "in", "not in"])),
    st.builds("{} {} none".format, st.sampled_from(["missing", "kinds", "n"]), st.sampled_from(["==", "!="])),
    st.builds("{} {} [1, 3, 'full']".format, _INTEGERS, st.sampled_from(["in", "not in"])),
    st.sampled_from(["tied", "tied == false", "true != tied", "none == none", "'full' in kinds"]),
)
_CONDITIONS = st.recursive(
    _COMPARED,
    lambda inner: st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("({})".format, inner),
        st.builds("not ({})".format, inner),
    ),
    max_leaves=6,
)


@given(_INTEGERS | _CONDITIONS)
def test_python_means_what_the_manifest_says(expression: str) -> None:
    try:
        wanted = evaluate(parse(expression), NAMES)
        python = text_of(expression)
    except ExpressionError:
        return
    args = SimpleNamespace(**NAMES)
    got = eval(python, {"__builtins__": {"len": len}}, {"args": args, "i": NAMES["i"]})
    assert (type(got), got) == (type(wanted), wanted)


@given(_CONDITIONS, st.sampled_from([4, 8, 12]))
def test_broken_lines_are_the_same_python(expression: str, indent: int) -> None:
    if len(expression) > MAX_LENGTH:
        return
    try:
        tokens = tokens_of(parse(expression))
    except ExpressionError:
        return
    lines = header("if", tokens, indent)
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line == line.rstrip() for line in lines)
    (tree,) = ast.parse("if True:\n " + "\n".join(lines) + f"\n{' ' * indent}    pass").body
    assert isinstance(tree, ast.If)
    (inner,) = tree.body
    assert isinstance(inner, ast.If)
    assert ast.dump(inner.test) == ast.dump(ast.parse(text_of(expression), mode="eval").body)


def test_a_statement_is_broken_in_its_last_brackets() -> None:
    tokens = tokens_of(parse("kinds[" + " + ".join(["n"] * 30) + "]"))
    lines = statement(tokens, 8)
    assert lines[0] == "        args.kinds["
    assert lines[1:3] == ["            args.n", "            + args.n"]
    assert lines[-1] == "        ]"


def test_text_is_escaped() -> None:
    """Also what a manifest's file could not hold, and would end a line in Python."""
    for string in ("\u2028", "\r", "\0", "\x85", "\ud800"):
        (token,) = tokens_of(parse(f"kinds == '{string}'"))[-1:]
        assert token.text.isascii()
        assert ast.literal_eval(token.text) == string


@pytest.mark.parametrize("path", ["args", "model.language_model.args", "a1.b_2"])
def test_paths_of_attributes(path: str) -> None:
    assert attribute_path(path) == path


@pytest.mark.parametrize("path", ["class", "args.import", "args.__class__", "_x", "a b", "a.b()", "ärgs", ""])
def test_paths_that_are_no_attributes_are_refused(path: str) -> None:
    with pytest.raises(MlxAuditError, match="no name of an attribute"):
        attribute_path(path)


@pytest.mark.parametrize("name", ["lambda", "class", "import", "async"])
def test_names_that_python_keeps_are_refused(name: str) -> None:
    with pytest.raises(MlxAuditError):
        text_of(f"{name} == 1")


@pytest.mark.parametrize(
    "expression", ["5[0] == 1", "'a' % 2 == 1", "1 == 'a'", "len(3) == 1", "1 // 0 == 1"]
)
def test_constants_that_have_no_value_are_refused(expression: str) -> None:
    """Python would warn of some of them, and raise in the module for the others."""
    with pytest.raises(ExpressionError):
        text_of(expression)


HOSTILE = """family: hostile
module: ./hostile.py
about: "\\"\\"\\" os.system('touch pwned')"
sources: ["x"]
topology:
  count: n
  before:
    - {{when: "tied == true", cache: none}}
  layers:
    - {{when: "kinds[i] == {quoted}", cache: rotating, window: "n + 1", keep: 0}}
    - {{when: "i == 5", cache: composite, of: [{{cache: linear}}, {{cache: quantized, bits: 4, group_size: n}}]}}
    - {{when: "i == 6", cache: chunked, chunk: "9223372036854775807"}}
variants: {{v: {{exactness: exact, tiny: {{n: 1}}, claims: {{compiled_decode: undecided}}}}}}
"""
STRINGS = ['); import os; os.system("x")', '"""', "{{ 7 * 7 }}", "{% raw %}", "#", "\U0001f600", "é"]
CALLED = {"entry", "allocate", "range", "len", "append", "entries", "NotCompileCapable"}


@pytest.mark.parametrize("string", STRINGS)
def test_strings_of_a_manifest_stay_strings(string: str, tmp_path: Path) -> None:
    escaped = string.replace('"', '\\"')  # the whole condition is a YAML string in double quotes
    tree = ast.parse(hostile(tmp_path, "hostile.yaml", f"'{escaped}'"))
    written = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert string in written
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "?")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert called == CALLED - {"len"}


@pytest.mark.parametrize(
    "name",
    ["a\nimport os.yaml", "coding=utf-7 +AAo-import os.yaml", "a b'c.yaml", "ü\u2028.yaml", "x;y.yaml"],
)
def test_the_name_of_a_manifest_is_only_a_name(name: str, tmp_path: Path) -> None:
    text = hostile(tmp_path, name, "'full'")
    first, second, *_ = text.split("\n")
    assert first.startswith("# Made by mlx-audit ")
    assert first.isascii()
    assert "coding=" not in first
    assert second == ""
    compile(text.encode(), "generated.py", "exec")


def hostile(folder: Path, name: str, quoted: str) -> str:
    """Return the module of a manifest whose file has this name, and which compares with a quoted string."""
    (folder / "hostile.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass ModelArgs:\n"
        "    n: int\n    kinds: list\n    tied: bool\n"
    )
    file = folder / name
    file.write_text(HOSTILE.format(quoted=quoted), encoding="utf-8")
    return render_adapter(load_manifest(file))
