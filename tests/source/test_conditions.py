"""A hazard that only a configuration can reach says which, and which class must be built for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_audit.source import SourceReport
from source_files import decoder, hazards, marked, read

LATE = "class Late(nn.Module):\n    def __call__(self, x, n):\n        return x[: int(n)]{mark}\n"
NEEDS_LATE = ("mlx_lm.models.audited.Late",)
NEEDS_ATTENTION = ("mlx_lm.models.audited.Attention",)


def _only(report: SourceReport) -> tuple[str, tuple[str, ...]]:
    (hazard,) = report.hazards
    return hazard.when, hazard.needs


@pytest.mark.parametrize(
    ("built", "when"),
    [
        ("if args.window:\n    self.late = Late()\nelse:\n    self.late = None", "args.window"),
        ("self.late = Late() if args.window == 3 else nn.Identity()", "args.window == 3"),
        ("self.late = nn.Identity()\nif not args.window:\n    self.late = Late()", "not args.window"),
        ("self.late = None if args.window is None else Late()", "args.window is not None"),
        ("self.late = choose(args)", "args.window"),
        ("self.late = early(args)", "not args.window"),
        ("self.late = Late()", ""),
        ("if args.window:\n    self.late = Late()\nelse:\n    self.late = Late()", ""),
    ],
)
def test_a_class_that_is_built_under_a_condition(tmp_path: Path, built: str, when: str) -> None:
    top = LATE.format(mark="  #! SRC001") + (
        "\ndef choose(args):\n    if args.window:\n        return Late()\n    return nn.Identity()\n"
        "\ndef early(args):\n    if args.window:\n        return nn.Identity()\n    return Late()\n"
    )
    report = read(
        tmp_path, decoder(top=top, attention_init=built, attention="q = self.late(q, cache.offset)")
    )
    assert _only(report) == (when, NEEDS_LATE if when else ())


@pytest.mark.parametrize(
    ("code", "when"),
    [
        ("if self.local:\n    n = int(offset)", "self.local"),
        ("if self.local and self.heads > 2:\n    n = int(offset)", "self.local and self.heads > 2"),
        ("if self.local:\n    q = q * 1\nelse:\n    n = int(offset)", "not self.local"),
        (
            "if self.local:\n    if self.heads == 4:\n        n = int(offset)",
            "self.local and self.heads == 4",
        ),
        ("if self.heads == 4:\n    q = q * 1\nelif self.local:\n    n = int(offset)", "self.local"),
        ("n = int(offset) if self.local else 0", "self.local"),
        ("if self.local:\n    return q\nn = int(offset)", "not self.local"),
        ("if self.local:\n    raise ValueError\nn = int(offset)", ""),
        ("if self.local:\n    n = 1\nn = int(offset)", ""),
        ("late = self.local and int(offset)", ""),
        ("if L > self.heads:\n    n = int(offset)", "L > self.heads"),
        ("if keys.shape[2] > 64:\n    n = int(offset)", ""),
    ],
)
def test_a_branch_on_the_configuration(tmp_path: Path, code: str, when: str) -> None:
    source = decoder(attention_init="self.local = args.window is not None", attention=code)
    assert _only(read(tmp_path, source)) == (when, NEEDS_ATTENTION if when else ())


def test_a_constant_decides(tmp_path: Path) -> None:
    source = decoder(
        attention_init="self.local = False\nself.kind = 'full'",
        attention="if self.local:\n    n = int(offset)\nif self.kind == 'local':\n    n = int(offset)",
    )
    assert not read(tmp_path, source).hazards


def test_dynamic_rope_is_conditional_and_says_what_it_needs(tmp_path: Path) -> None:
    source = decoder(attention_init="self.rope = initialize_rope(16, 1.0, False, args.rope_scaling, 64)")
    when, needs = _only(read(tmp_path, source))
    assert when == "rope_type == 'dynamic'"
    assert needs == ("mlx_lm.models.rope_utils.DynamicNTKScalingRoPE",)


def test_dynamic_rope_without_a_configuration_is_not_reached(tmp_path: Path) -> None:
    source = decoder(attention_init="self.rope = initialize_rope(16, 1.0, False)")
    assert not read(tmp_path, source).hazards


def test_defaults_of_a_configuration_decide_nothing(tmp_path: Path) -> None:
    source = decoder(
        attention_init="self.window = args.window", attention="if self.window:\n    n = int(offset)"
    )
    when, _ = _only(read(tmp_path, source))
    assert when == "self.window"


def test_every_marked_condition(tmp_path: Path) -> None:
    source = decoder(
        attention_init="self.local = args.window is not None",
        attention="if self.local:\n    n = int(offset)  #! SRC001 when self.local\nn = int(offset)  #! SRC001",
    )
    assert hazards(read(tmp_path, source)) == marked(source)


def test_equal_words_in_two_functions_are_two_conditions(tmp_path: Path) -> None:
    top = "def inner(flag, n):\n    if flag:\n        return int(n)\n\ndef outer(flag, other, n):\n"
    top += "    if not flag:\n        return inner(other, n)\n"
    report = read(tmp_path, decoder(top=top, model="n = outer(self.args.a, self.args.b, offset)"))
    assert _only(report)[0] == "not flag and flag"


def test_self_in_a_condition_is_the_object_that_is_needed(tmp_path: Path) -> None:
    source = decoder(
        top=LATE.format(mark=""),
        attention_init="self.late = Late() if args.window else None\nself.local = args.window == 3",
        attention="if self.local:\n    q = self.late(q, cache.offset)",
    )
    when, needs = _only(read(tmp_path, source))
    assert when == "Attention.local and args.window"
    assert needs == NEEDS_LATE


def test_both_branches_are_no_condition(tmp_path: Path) -> None:
    top = "def whole(n):\n    return int(n)\n"
    code = "if self.local:\n    n = whole(offset)\nelse:\n    n = whole(offset + 1)"
    source = decoder(top=top, attention_init="self.local = args.window == 3", attention=code)
    assert _only(read(tmp_path, source)) == ("", ())
