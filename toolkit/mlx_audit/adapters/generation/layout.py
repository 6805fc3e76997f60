"""Lines of at most 88 columns, broken where black breaks them, so that black has nothing to change."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_audit.adapters.generation.python_source import COMMA, Token

WIDTH = 88
_STEP = 4


def statement(tokens: Sequence[Token], indent: int) -> list[str]:
    """Return the lines of a statement that ends with a bracket, such as a call."""
    return _lines(list(tokens), indent, inside=False)


def header(keyword: str, condition: Sequence[Token], indent: int) -> list[str]:
    """Return the lines of `keyword condition:`; a long condition stands in parentheses."""
    plain = [Token(f"{keyword} "), *condition, Token(":")]
    if _fits(plain, indent) or _needs_no_parentheses(plain[:-1], indent):
        return _lines(plain, indent, inside=False)
    return _lines(
        [Token(f"{keyword} (", "open"), *condition, Token(")", "close"), Token(":")], indent, inside=False
    )


def _needs_no_parentheses(tokens: Sequence[Token], indent: int) -> bool:
    """Return whether a line can be broken in its last brackets: it has one operator at most, and ends with them."""
    loosest = max(_operators(tokens), key=lambda at: tokens[at].binding, default=None)
    if loosest is None:
        return tokens[-1].kind in ("close", "index")
    binding = tokens[loosest].binding
    alone = sum(tokens[at].binding == binding for at in _operators(tokens)) == 1
    return (
        alone
        and tokens[-1].kind == "close"
        and _fits(tokens[: _opening(tokens, len(tokens) - 1) + 1], indent)
    )


def _lines(tokens: list[Token], indent: int, *, inside: bool, items: bool = False) -> list[str]:
    """Break at the operators that bind loosest where the line stands inside brackets, else in the last brackets.

    Args:
        tokens: The line.
        indent: Of the line.
        inside: Whether it stands inside brackets that have been broken.
        items: Whether it is what a list holds, of which each item then has a line of its own.
    """
    operators = _operators(tokens)
    if _fits(tokens, indent) and not (items and operators):
        return [_text(tokens, indent)]
    if not (inside and operators):
        return _in_last_brackets(tokens, indent)
    loosest = max(tokens[at].binding for at in operators)
    found: list[str] = []
    start = 0
    for at in [at for at in operators if tokens[at].binding == loosest]:
        if loosest == COMMA:
            found += _lines([*tokens[start:at], Token(",")], indent, inside=True)
            start = at + 1
        else:
            found += _lines(tokens[start:at], indent, inside=True)
            tokens[at] = Token(tokens[at].text.lstrip())
            start = at
    end = [Token(",")] if loosest == COMMA else []
    return found + _lines([*tokens[start:], *end], indent, inside=True)


def _in_last_brackets(tokens: list[Token], indent: int) -> list[str]:
    close = max((at for at, token in enumerate(tokens) if token.kind in ("close", "index")), default=None)
    if close is None or _opening(tokens, close) + 1 == close:
        return [_text(tokens, indent)]
    start = _opening(tokens, close)
    items = (tokens[start].text, tokens[close].kind) == ("[", "close")
    body = _lines(tokens[start + 1 : close], indent + _STEP, inside=True, items=items)
    return [_text(tokens[: start + 1], indent), *body, _text(tokens[close:], indent)]


def _operators(tokens: Sequence[Token]) -> list[int]:
    """Return where operators stand outside of all brackets."""
    found, depth = [], 0
    for at, token in enumerate(tokens):
        depth += (token.kind == "open") - (token.kind in ("close", "index"))
        if token.kind == "operator" and depth == 0:
            found.append(at)
    return found


def _opening(tokens: Sequence[Token], close: int) -> int:
    depth = 0
    for at in range(close, -1, -1):
        depth += (tokens[at].kind in ("close", "index")) - (tokens[at].kind == "open")
        if depth == 0:
            return at
    raise AssertionError("brackets come in pairs")


def _text(tokens: Sequence[Token], indent: int) -> str:
    return " " * indent + "".join(token.text for token in tokens).rstrip()


def _fits(tokens: Sequence[Token], indent: int) -> bool:
    return len(_text(tokens, indent)) <= WIDTH
