"""The expression language: what it reads, what it refuses, and its agreement with an independent oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.manifests import ExpressionError
from mlx_audit.manifests.evaluation import evaluate, evaluate_condition, evaluate_integer, names_of
from mlx_audit.manifests.expressions import MAX_DEPTH, MAX_INTEGER, MAX_LENGTH, parse

NAMES = {
    "i": 3,
    "n": 8,
    "window": None,
    "tied": True,
    "theta": 1.5,
    "kinds": ["full", "sliding", "full", "sliding"],
    "pattern": "MM*-",
    "scaling": {"type": "yarn", "factor": 4},
    "empty": [],
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n", 8),
        ("n > 8", False),
        ("n >= 8", True),
        ("n < 8", False),
        ("n <= 8", True),
        ("n - 1 - 2", 5),
        ("n + 2 // 3", 8),
        ("-n // 3", -3),
        ("- -1", 1),
        ("7 % 4 % 2", 1),
        ("(n + 1) % 2 == 1", True),
        ("kinds[i] == 'sliding'", True),
        ("kinds[len(kinds) - 1]", "sliding"),
        ("pattern[i - 1]", "*"),
        ("scaling['type'] != \"yarn\"", False),
        ("'sliding' in kinds", True),
        ("'sliding' not in kinds", False),
        ("'M*' in pattern", True),
        ("'type' in scaling and scaling['factor'] > 2", True),
        ("i in [1, 3, -5]", True),
        ("kinds == ['full', 'sliding', 'full', 'sliding']", True),
        ("window == none", True),
        ("window != none and window > 4", False),
        ("window == none or window > 4", True),
        ("not tied or i < 2 and i >= 0", False),
        ("not (tied and i == 2)", True),
        ("not not tied", True),
        ("theta <= 1 or theta > 1", True),
        ("true == tied", True),
        ("len('') == 0", True),
        ("n in empty", False),
        ("none in [none]", True),
        ("1 in [true]", False),
        ("[] == []", True),
    ],
)
def test_values(text: str, value: object) -> None:
    result = evaluate(parse(text), NAMES)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "found: the end"),
        ("n +", 4, "found: the end"),
        ("n n", 3, "an operator, or the end"),
        ("n = 1", 3, "use == to compare"),
        ("n.real", 2, "attributes cannot be reached"),
        ("abs(n)", 4, "only len"),
        ("kinds[0](1)", 9, "only len"),
        ("n * 2", 3, "multiplication"),
        ("n / 2", 3, "use //"),
        ("n is none", 3, "write '=='"),
        ("True", 1, "write 'true'"),
        ("0 < n < 9", 7, "cannot be chained"),
        ("1 == 1 == 1", 8, "cannot be chained"),
        ("1.5", 1, "not an integer"),
        ("1_000", 1, "not an integer"),
        ("0x10", 1, "not an integer"),
        (str(MAX_INTEGER + 1), 1, "not an integer"),
        ("'a", 1, "close the string"),
        ("'\\n'", 1, "close the string"),
        ("_n", 1, "private"),
        ("__import__('os')", 1, "private"),
        ("[n]", 2, "found: 'n'"),
        ("[1, [2]]", 5, "found: '['"),
        ("[1 2]", 4, "or ']' after an item"),
        ("kinds[0", 8, "to close the index"),
        ("kinds[0:1]", 8, "a character that no expression has"),
        ("len n", 5, "after len"),
        ("(n", 3, "to close the parenthesis"),
        ("lambda: n", 7, "a character that no expression has"),
        ("n if n else n", 3, "an operator"),
        ("{{ n }}", 1, "a character that no expression has"),
        ("n\t+ 1", 2, "a character that no expression has"),
        ("é", 1, "a character that no expression has"),
        ("-" * 21 + "1", 21, "nested too deeply"),
        ("not in [1]", 5, "found: 'in'"),
    ],
)
def test_what_cannot_be_read(text: str, column: int, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert caught.value.column == column
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("kind[0]", 1, "did you mean 'kinds'?"),
        ("1 == kind", 6, "did you mean 'kinds'?"),
        ("kinds[4]", 6, "out of range"),
        ("kinds[-1]", 6, "out of range"),
        ("empty[0]", 6, "the list is empty"),
        ("kinds['0']", 6, "not an integer"),
        ("kinds[tied]", 6, "not an integer"),
        ("scaling['kind']", 8, "no such key"),
        ("n[0]", 2, "cannot be indexed"),
        ("len(n)", 1, "no length"),
        ("n == '8'", 3, "compared"),
        ("tied == 1", 6, "compared"),
        ("window < 4", 8, "not a number"),
        ("tied < 4", 6, "not a number"),
        ("n in 8", 3, "no items"),
        ("1 in pattern", 3, "only a string"),
        ("n and tied", 1, "neither true nor false"),
        ("tied and n", 10, "neither true nor false"),
        ("not n", 1, "neither true nor false"),
        ("n + theta", 3, "not an integer"),
        ("tied + 1", 6, "not an integer"),
        ("'a' + 'b'", 5, "not an integer"),
        ("-pattern", 1, "not an integer"),
        ("n // (n - 8)", 3, "division by zero"),
        ("n % 0", 3, "division by zero"),
        (f"{MAX_INTEGER} + 1", 21, "too large"),
    ],
)
def test_what_cannot_be_evaluated(text: str, column: int, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        evaluate(parse(text), NAMES)
    assert caught.value.column == column
    assert message in str(caught.value)


def test_length_and_depth_are_bounded() -> None:
    assert evaluate(parse("1" + " " * (MAX_LENGTH - 1)), {}) == 1
    with pytest.raises(ExpressionError, match="too long"):
        parse("1" + " " * MAX_LENGTH)
    assert evaluate(parse("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH), {}) == 1
    with pytest.raises(ExpressionError, match="too deeply"):
        parse("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))


def test_conditions_and_counts_have_their_type() -> None:
    assert evaluate_condition(parse("n > 1"), NAMES) is True
    assert evaluate_integer(parse("n - 8"), NAMES) == 0
    with pytest.raises(ExpressionError, match="neither true nor false"):
        evaluate_condition(parse("n"), NAMES)
    for text in ("n - 9", "tied", "window", "theta", "pattern"):
        with pytest.raises(ExpressionError, match="not a count"):
            evaluate_integer(parse(text), NAMES)


def test_names_come_from_mappings_and_from_resolved_arguments() -> None:
    @dataclass
    class Arguments:
        n: int = 4
        types: list[str] | None = None
        shared: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.types = self.types or ["full"] * self.n
            self.extra = 7

        @property
        def computed(self) -> int:
            raise AssertionError("properties are code, and are not run")

    assert names_of(Arguments()) == {"n": 4, "types": ["full"] * 4, "shared": [], "extra": 7}
    assert names_of({"n": 1, 2: "no name"}) == {"n": 1}


def test_names_used_are_known_with_their_first_column() -> None:
    assert parse("a[i] == b and len(a) > i").names == {"a": 1, "i": 3, "b": 9}


@given(st.text(max_size=MAX_LENGTH + 5) | st.text("ni01 +-/%<>=!()[],'\"_.aelnortud", max_size=40))
def test_any_text_gives_a_value_or_an_expression_error(text: str) -> None:
    try:
        evaluate(parse(text), NAMES)
    except ExpressionError as error:
        assert 1 <= error.column <= len(text) + 1


_WORDS = st.sampled_from(
    ["n", "i", "kinds", "pattern", "scaling", "window", "tied", "0", "1", "2", "'full'", "true", "none"]
    + ["and", "or", "not", "in", "len", "(", ")", "[", "]", "==", "!=", "<", "+", "-", "//", "%", ","]
)


@given(st.lists(_WORDS, max_size=14))
def test_any_words_give_a_value_or_an_expression_error(words: list[str]) -> None:
    try:
        evaluate(parse(" ".join(words)), NAMES)
    except ExpressionError:
        pass


# The oracle: pairs of text and value built side by side, so that no second parser is needed.
Case = tuple[str, object]
_NUMBERS = st.one_of(
    st.integers(0, 50).map(lambda n: (str(n), n)),
    st.sampled_from([("n", 8), ("i", 3), ("len(kinds)", 4), ("scaling['factor']", 4)]),
)


def _joined(operator: str, apply: Callable[[int, int], object]) -> Callable[[tuple[Case, Case]], Case]:
    def join(pair: tuple[Case, Case]) -> Case:
        (left, a), (right, b) = pair
        assert isinstance(a, int)
        assert isinstance(b, int)
        return f"({left} {operator} {right})", apply(a, b)

    return join


def _sums(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    pairs = st.tuples(inner, inner)
    divisible = pairs.filter(lambda pair: pair[1][1] != 0)
    return st.one_of(
        pairs.map(_joined("+", lambda a, b: a + b)),
        pairs.map(_joined("-", lambda a, b: a - b)),
        divisible.map(_joined("//", lambda a, b: a // b)),
        divisible.map(_joined("%", lambda a, b: a % b)),
        inner.map(lambda case: (f"(-{case[0]})", -case[1])),  # type: ignore[operator]
    )


_SUMS = st.recursive(_NUMBERS, _sums, max_leaves=4)
_COMPARISONS = st.one_of(
    st.tuples(_SUMS, _SUMS).map(_joined("<", lambda a, b: a < b)),
    st.tuples(_SUMS, _SUMS).map(_joined(">=", lambda a, b: a >= b)),
    st.tuples(_SUMS, _SUMS).map(_joined("==", lambda a, b: a == b)),
    st.tuples(_SUMS, _SUMS).map(_joined("!=", lambda a, b: a != b)),
    st.integers(0, 3).map(lambda at: (f"kinds[{at}] == 'full'", at % 2 == 0)),
)


def _logic(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: (f"({p[0][0]} and {p[1][0]})", p[0][1] and p[1][1])),
        pairs.map(lambda p: (f"({p[0][0]} or {p[1][0]})", p[0][1] or p[1][1])),
        inner.map(lambda case: (f"(not {case[0]})", not case[1])),
    )


@given(_SUMS | st.recursive(_COMPARISONS, _logic, max_leaves=4))
def test_values_agree_with_the_oracle(case: Case) -> None:
    text, value = case
    if len(text) <= MAX_LENGTH:
        assert evaluate(parse(text), NAMES) == value


@given(st.integers(-9, 9), st.integers(0, 9), st.integers(1, 9), st.booleans(), st.booleans())
def test_precedence_without_parentheses_is_the_usual_one(a: int, b: int, c: int, p: bool, q: bool) -> None:
    names = {"a": a, "b": b, "c": c, "p": p, "q": q}
    assert evaluate(parse("a + b // c - a % c"), names) == a + b // c - a % c
    assert evaluate(parse("a - b < c + b"), names) == (a - b < c + b)
    assert evaluate(parse("p or q and not p"), names) == (p or (q and not p))
    assert evaluate(parse("not a == b or p"), names) == ((not a == b) or p)  # noqa: SIM201
