"""Foreign text in Markdown: nothing of it is markup, a mention, a link or a table cell."""

from __future__ import annotations

import re
import shlex
from itertools import groupby

from mlx_audit.errors import clean

_PUNCTUATION = frozenset(".,;:()'\"/=+%…?!–—→≤≥×°-")
"""What Markdown gives no meaning inside a line."""

_LINKED = re.compile(r"://|www\.|GH-\d|^[0-9a-fA-F]{7,40}$", re.IGNORECASE)
"""What GitHub makes a link of although nothing marks it."""


_OUTSIDE = re.compile(r"(\s*)(.*?)([.,;:]?\s*)", re.DOTALL)


def code(text: object, limit: int = 1_000) -> str:
    """Return a text as a code span that is safe in a table cell too; an empty one as a dash."""
    shown = clean(text, limit).strip()
    if not shown:
        return "–"
    if "|" in shown:  # which splits cells of a table even in a span, and there alone can be escaped
        return f"<code>{html(shown, len(shown), plain=' ')}</code>"
    fence = "`" * (1 + _longest_run(shown))
    edge = " " if "`" in (shown[0], shown[-1]) else ""
    return f"{fence}{edge}{shown}{edge}{fence}"


def prose(text: object, limit: int = 1_000) -> str:
    """Return a sentence with its quoted pieces, and each word that could be markup, as code spans."""
    pieces = clean(text, limit).split("`")
    if len(pieces) % 2 == 0:  # a quote that is not closed
        return code(text, limit)
    return "".join(code(piece) if i % 2 else _words(piece) for i, piece in enumerate(pieces))


def fenced(command: str, limit: int = 2_000) -> str:
    """Return a command as a block of code, in one line."""
    shown = clean(command, limit)
    fence = "`" * max(3, 1 + _longest_run(shown))
    return f"{fence}text\n{shown}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _words(text: str) -> str:
    """Return a text without backticks: words that could be markup become code spans, neighbours one together."""
    runs = groupby(re.split(r"(?<=\s)(?=\S)", text), key=_is_plain)
    return "".join(part if plain else _spanned(part) for plain, run in runs for part in ["".join(run)])


def _is_plain(word: str) -> bool:
    bare = word.strip()
    return all(c.isalnum() or c in _PUNCTUATION for c in bare) and not _LINKED.search(bare)


def _spanned(words: str) -> str:
    """Return words as a code span, the space around them and a comma or full stop at their end outside of it."""
    before, inner, after = _OUTSIDE.fullmatch(words).groups()  # type: ignore[union-attr] # it matches anything
    return f"{before}{code(inner) if inner else ''}{after}"


def html(text: object, limit: int = 200, plain: str = " .,:/+-_") -> str:
    """Return a text as HTML in which every character is named but letters, digits and those that are plain."""
    shown = clean(text, limit)
    return "".join(c if c.isalnum() or c in plain else f"&#{ord(c)};" for c in shown)


def command(*words: str) -> str:
    """Return a command line that a shell reads as these words, whatever is in them."""
    return shlex.join(words)
