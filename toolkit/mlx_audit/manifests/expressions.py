"""The expressions of manifests: a grammar of their own, never Python's `eval`.

    or      := and ("or" and)*
    and     := not ("and" not)*
    not     := "not" not | compare
    compare := sum (("==" | "!=" | "<" | "<=" | ">" | ">=" | "in" | "not" "in") sum)?
    sum     := term (("+" | "-") term)*
    term    := unary (("//" | "%") unary)*
    unary   := "-" unary | postfix
    postfix := primary ("[" or "]")*
    primary := integer | string | "true" | "false" | "none" | name | "len" "(" or ")" | "(" or ")" | "[" literals "]"

Names are fields of the model's resolved arguments, and `i`, the layer's index, where layers are described.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mlx_audit.manifests.syntax import (
    Binary,
    Expression,
    ExpressionError,
    Index,
    Length,
    Literal,
    Name,
    Node,
    Unary,
)

MAX_LENGTH = 200
"""Characters in one expression."""
MAX_DEPTH = 20
"""Levels of nesting: parentheses, indices, `not` and minus signs."""
MAX_INTEGER = 2**63 - 1
"""Largest magnitude of a literal and of every intermediate result."""

KEYWORDS = frozenset({"and", "or", "not", "in", "true", "false", "none", "len"})
_FOREIGN = {
    "True": "true",
    "False": "false",
    "None": "none",
    "null": "none",
    "is": "==",
    "AND": "and",
    "OR": "or",
}
_TOKEN = re.compile(
    r"(?P<space> +)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9][0-9A-Za-z_.]*)"
    r"|(?P<string>'[^'\\\n]*'|\"[^\"\\\n]*\")|(?P<sign>==|!=|<=|>=|//|[-+%<>()\[\],])"
)
_ADVICE = {
    ".": "attributes cannot be reached; name a field of the arguments",
    "*": "multiplication is not part of the grammar",
    "/": "use //, division of integers",
    "=": "use == to compare",
    "&": "use `and`",
    "|": "use `or`",
    "!": "use `not`, or !=",
    "\\": "escapes are not part of the grammar",
    "'": "close the string with '",
    '"': 'close the string with "',
}


def constant(value: int) -> Expression:
    """The expression of a number written as YAML integer."""
    return Expression(str(value), Literal(1, value))


def parse(text: str) -> Expression:
    """Read an expression, or raise ExpressionError."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            "the expression is too long",
            MAX_LENGTH + 1,
            found=f"{len(text)} characters",
            allowed=f"at most {MAX_LENGTH}",
        )
    parser = _Parser(_tokens(text))
    root = parser.disjunction(0)
    parser.finish()
    return Expression(text, root)


@dataclass(frozen=True)
class _Token:
    kind: str  # name, number, string, sign, end
    text: str
    column: int


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(
                "a character that no expression has", at + 1, found=repr(text[at]), fix=_ADVICE.get(text[at])
            )
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match.group(), at + 1))
        at = match.end()
    tokens.append(_Token("end", "", len(text) + 1))
    return tokens


class _Parser:
    """Recursive descent over the tokens; `depth` bounds the recursion."""

    def __init__(self, tokens: list[_Token]):
        self.tokens = tokens
        self.at = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> _Token | None:
        """Consume the next token when it is one of these signs or keywords."""
        token = self.token
        if token.text in texts and token.kind in ("sign", "name"):
            self.at += 1
            return token
        return None

    def expect(self, text: str, why: str) -> None:
        if self.take(text) is None:
            raise self.unexpected(f"{text!r} {why}")

    def unexpected(self, allowed: str) -> ExpressionError:
        token = self.token
        found = repr(token.text) if token.text else "the end"
        fix = f"write {_FOREIGN[token.text]!r}" if token.text in _FOREIGN else None
        return ExpressionError(
            "the expression cannot be read here", token.column, found=found, allowed=allowed, fix=fix
        )

    def deeper(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise ExpressionError(
                "nested too deeply", self.tokens[self.at - 1].column, allowed=f"at most {MAX_DEPTH} levels"
            )
        return depth + 1

    def finish(self) -> None:
        if self.token.kind == "end":
            return
        if self.token.text == "(":
            raise ExpressionError(
                "a call", self.token.column, found="'('", allowed="only len(...) may be called"
            )
        raise self.unexpected("an operator, or the end")

    def disjunction(self, depth: int) -> Node:
        return self.chain(depth, ("or",), self.conjunction)

    def conjunction(self, depth: int) -> Node:
        return self.chain(depth, ("and",), self.negation)

    def sum(self, depth: int) -> Node:
        return self.chain(depth, ("+", "-"), self.term)

    def term(self, depth: int) -> Node:
        return self.chain(depth, ("//", "%"), self.unary)

    def chain(self, depth: int, operators: tuple[str, ...], operand: Callable[[int], Node]) -> Node:
        left = operand(depth)
        while (token := self.take(*operators)) is not None:
            left = Binary(token.column, token.text, left, operand(depth))
        return left

    def negation(self, depth: int) -> Node:
        token = self.take("not")
        if token is None:
            return self.comparison(depth)
        return Unary(token.column, "not", self.negation(self.deeper(depth)))

    def comparison(self, depth: int) -> Node:
        left = self.sum(depth)
        token = self.relation()
        if token is None:
            return left
        node = Binary(token.column, token.text, left, self.sum(depth))
        if self.relation() is not None:
            raise ExpressionError(
                "comparisons cannot be chained",
                self.tokens[self.at - 1].column,
                fix="join two comparisons with `and`",
            )
        return node

    def relation(self) -> _Token | None:
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        if self.token.text == "not" and following.text == "in" and following.kind == "name":
            token = _Token("name", "not in", self.token.column)
            self.at += 2
            return token
        return self.take("==", "!=", "<", "<=", ">", ">=", "in")

    def unary(self, depth: int) -> Node:
        token = self.take("-")
        if token is None:
            return self.postfix(depth)
        return Unary(token.column, "-", self.unary(self.deeper(depth)))

    def postfix(self, depth: int) -> Node:
        node = self.primary(depth)
        while (token := self.take("[")) is not None:
            node = Index(token.column, node, self.disjunction(self.deeper(depth)))
            self.expect("]", "to close the index")
        return node

    def primary(self, depth: int) -> Node:
        token = self.token
        if self.take("("):
            node = self.disjunction(self.deeper(depth))
            self.expect(")", "to close the parenthesis")
            return node
        if self.take("["):
            return Literal(token.column, self.items())
        if self.take("len"):
            self.expect("(", "after len")
            node = Length(token.column, self.disjunction(self.deeper(depth)))
            self.expect(")", "to close len(")
            return node
        if token.kind == "name" and token.text not in KEYWORDS:
            return self.name()
        return Literal(token.column, self.literal())

    def name(self) -> Node:
        token = self.token
        if token.text in _FOREIGN:
            raise self.unexpected("a value")
        if token.text.startswith("_"):
            raise ExpressionError(
                "a private name", token.column, found=token.text, allowed="fields of the arguments"
            )
        self.at += 1
        return Name(token.column, token.text)

    def items(self) -> tuple[object, ...]:
        values: list[object] = []
        while not self.take("]"):
            if values:
                self.expect(",", "or ']' after an item")
            values.append(self.literal())
        return tuple(values)

    def literal(self) -> int | str | bool | None:
        token = self.token
        words = {"true": True, "false": False, "none": None}
        if token.kind == "name" and token.text in words:
            self.at += 1
            return words[token.text]
        if token.kind == "string":
            self.at += 1
            return token.text[1:-1]
        minus = self.take("-")
        if self.token.kind != "number":
            raise self.unexpected("a name, an integer, a string, true, false, none, a list or '('")
        return -self.integer() if minus else self.integer()

    def integer(self) -> int:
        token = self.token
        if not token.text.isdecimal() or int(token.text) > MAX_INTEGER:
            raise ExpressionError(
                "not an integer",
                token.column,
                found=token.text,
                allowed=f"decimal digits, at most {MAX_INTEGER}",
            )
        self.at += 1
        return int(token.text)
