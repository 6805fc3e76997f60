"""Defects of a llama copy, as text replacements in mlx-lm's source, with a word that the finding must contain."""

from __future__ import annotations

Replacements = list[tuple[str, str]]

ROPE = [
    ("queries = self.rope(queries, offset=cache.offset)", "queries = self.rope(queries, offset=position)"),
    ("keys = self.rope(keys, offset=cache.offset)", "keys = self.rope(keys, offset=position)"),
]
"""RoPE takes `position`, which the other replacements of a mutant define."""

IF_CACHE = "        if cache is not None:\n            queries"
ATTENTION = "        self.scale = head_dim**-0.5\n"
FA_MASK = "        fa_mask = create_attention_mask(h, cache[self.fa_idx])\n"
MODEL = "        self.swa_idx = None\n"
HEAD = "@dataclass\nclass ModelArgs"
BODY = "        for layer, cache in zip(self.layers, cache):\n"


def position(code: str, *, init: str = "", head: str = "") -> Replacements:
    """Return a mutant whose RoPE offset comes from `code`, which ends by setting `position`."""
    lines = "".join(f"        {line}\n" for line in code.split("\n"))
    found = [*ROPE, ("        if cache is not None:\n", f"{lines}        if cache is not None:\n")]
    if init:
        found.append((ATTENTION, ATTENTION + "".join(f"        {line}\n" for line in init.split("\n"))))
    if head:
        found.append((HEAD, f"{head}\n\n\n{HEAD}"))
    return found


def mask(code: str, *, init: str = "", head: str = "") -> Replacements:
    """Return a mutant whose `fa_mask` comes from `code`."""
    lines = "".join(f"        {line}\n" for line in code.split("\n"))
    found = [(FA_MASK, lines)]
    if init:
        found.append((MODEL, MODEL + "".join(f"        {line}\n" for line in init.split("\n"))))
    if head:
        found.append((HEAD, f"{head}\n\n\n{HEAD}"))
    return found


def body(code: str, *, init: str = "", head: str = "") -> Replacements:
    """Return a mutant that runs `code` on the embedded tokens `h` before the layers."""
    return mask(FA_MASK.strip() + "\n" + code, init=init, head=head)


MAKE_MASK = "create_attention_mask(h, cache[self.fa_idx])"

MUTANTS: dict[str, tuple[Replacements, str]] = {
    # the position on the host
    "offset through int": (position("position = int(cache.offset)"), ".py:"),
    "offset through item": (
        position("position = getattr(cache.offset, 'item', lambda: cache.offset)()"),
        ".py:",
    ),
    "branch on the offset": (position("position = cache.offset if cache.offset > 2 else 0"), ".py:"),
    "keys sliced by the offset": (
        [
            (
                "            keys, values = cache.update_and_fetch(keys, values)\n",
                (
                    "            keys, values = cache.update_and_fetch(keys, values)\n"
                    "            keys, values = keys[..., : cache.offset, :], values[..., : cache.offset, :]\n"
                ),
            )
        ],
        ".py:",
    ),
    "keys sliced by a counter": (
        [
            (ATTENTION, ATTENTION + "        self.seen = 0\n"),
            (
                "            keys, values = cache.update_and_fetch(keys, values)\n",
                (
                    "            keys, values = cache.update_and_fetch(keys, values)\n"
                    "            self.seen += L\n"
                    "            keys, values = keys[..., : self.seen, :], values[..., : self.seen, :]\n"
                    "            mask = mask[..., : self.seen] if isinstance(mask, mx.array) else mask\n"
                ),
            ),
        ],
        "Slice arguments",
    ),
    # counters
    "counter on the module": (position("position = self.seen\nself.seen += L", init="self.seen = 0"), "RoPE"),
    "private counter": (position("position = self._seen\nself._seen += L", init="self._seen = 0"), "RoPE"),
    "counter in a dict": (
        position("position = self.at['n']\nself.at['n'] += L", init="self.at = {'n': 0}"),
        "RoPE",
    ),
    "counter in a list": (position("position = self.at[0]\nself.at[0] += L", init="self.at = [0]"), "RoPE"),
    "counter in a plain object": (
        position(
            "position = self.box.n\nself.box.n += L", init="self.box = Box()", head="class Box:\n    n = 0"
        ),
        "RoPE",
    ),
    "counter in slots": (
        position(
            "position = self.box.n\nself.box.n += L",
            init="self.box = Box()",
            head="class Box:\n    __slots__ = ('n',)\n\n    def __init__(self):\n        self.n = 0",
        ),
        "RoPE",
    ),
    "counter on the class": (
        position("position = type(self).seen\ntype(self).seen += L", init="type(self).seen = 0"),
        "RoPE",
    ),
    "counter in a closure": (
        position(
            "position = self.counter(L)",
            init="self.counter = make_counter()",
            head="def make_counter():\n    n = 0\n\n    def count(L):\n        nonlocal n\n        n += L\n"
            "        return n - L\n\n    return count",
        ),
        "RoPE",
    ),
    "counter in a generator": (
        position(
            "position = next(self.counter)",
            init="import itertools\nself.counter = itertools.count()",
        ),
        "RoPE",
    ),
    "module-level counter": (
        position("global SEEN\nposition = SEEN\nSEEN += L", head="SEEN = 0"),
        "RoPE",
    ),
    "module-level dict": (position("position = SEEN['n']\nSEEN['n'] += L", head="SEEN = {'n': 0}"), "RoPE"),
    "length of a list that grows": (
        position("position = len(self.past)\nself.past.extend([0] * L)", init="self.past = []"),
        "RoPE",
    ),
    "array counter on the module": (
        position(
            "position = self.seen\nself.seen = self.seen + L",
            init="self.seen = mx.zeros((1,), mx.int32)",
        ),
        "",
    ),
    "private array counter": (
        position(
            "position = self._seen\nself._seen = self._seen + L",
            init="self._seen = mx.zeros((1,), mx.int32)",
        ),
        "",
    ),
    # toggles
    "toggle": (
        body("self.flip = not self.flip\nh = h * 2 if self.flip else h", init="self.flip = False"),
        "",
    ),
    "toggle by parity of calls": (
        body("CALLS.append(1)\nh = h * (1 + len(CALLS) % 2)", head="CALLS = []"),
        "",
    ),
    # masks
    "mask kept, None check": (
        mask(
            f"if self.kept is None:\n    self.kept = {MAKE_MASK}\nfa_mask = self.kept",
            init="self.kept = None",
        ),
        "",
    ),
    "mask kept in decode only": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] == 1:\n    if self._kept is None:\n        self._kept = fa_mask\n"
            "    fa_mask = self._kept",
            init="self._kept = None",
        ),
        "",
    ),
    "mask kept as an array at prefill": (
        mask(
            "if self._kept is None:\n    self._kept = cache[self.fa_idx].make_mask(h.shape[1], return_array=True, "
            "window_size=None)\nfa_mask = self._kept if h.shape[1] == 1 and self._kept is not None else "
            f"{MAKE_MASK}",
            init="self._kept = None",
        ),
        "",
    ),
    "mask kept by length": (
        mask(
            f"fa_mask = self.kept.setdefault(str(h.shape[1]), None)\nif fa_mask is None:\n"
            f"    fa_mask = self.kept[str(h.shape[1])] = {MAKE_MASK}",
            init="self.kept = {}",
        ),
        "",
    ),
    "mask appended to a list": (
        mask(f"self.kept.append({MAKE_MASK})\nfa_mask = self.kept[0]", init="self.kept = []"),
        "",
    ),
    "mask kept, hasattr": (
        mask(f"if not hasattr(self, '_kept'):\n    self._kept = {MAKE_MASK}\nfa_mask = self._kept"),
        "",
    ),
    "mask in an lru_cache": (
        mask(
            "KEPT[:] = [h, cache[self.fa_idx]]\nfa_mask = kept(h.shape[1])",
            head="import functools\n\nKEPT = []\n\n\n@functools.lru_cache\ndef kept(N):\n"
            "    return create_attention_mask(*KEPT)",
        ),
        "",
    ),
    "mask in a module-level dict": (
        mask(
            f"if h.shape[1] not in KEPT:\n    KEPT[h.shape[1]] = {MAKE_MASK}\nfa_mask = KEPT[h.shape[1]]",
            head="KEPT = {}",
        ),
        "",
    ),
    "mask in a plain object": (
        mask(
            f"if not hasattr(self.box, 'kept'):\n    self.box.kept = {MAKE_MASK}\nfa_mask = self.box.kept",
            init="self.box = Box()",
            head="class Box:\n    pass",
        ),
        "",
    ),
    # captured at prefill
    "window start at prefill, int": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n    self.start = max(0, cache[0].offset + h.shape[1] - 2)\n"
            "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self.start)",
            init="self.start = 0",
        ),
        "mask",
    ),
    "window start at prefill, private int": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n    self._start = max(0, cache[0].offset + h.shape[1] - 2)\n"
            "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self._start)",
            init="self._start = 0",
        ),
        "mask",
    ),
    "window start at prefill, array": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n"
            "    self.start = mx.array(max(0, cache[0].offset + h.shape[1] - 2))\n"
            "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self.start)",
            init="self.start = mx.array(0)",
        ),
        "",
    ),
    "window start at prefill, private array": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n"
            "    self._start = mx.array(max(0, cache[0].offset + h.shape[1] - 2))\n"
            "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self._start)",
            init="self._start = mx.array(0)",
        ),
        "",
    ),
    "window start at prefill, array written in place": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n"
            "    self.start[:] = max(0, cache[0].offset + h.shape[1] - 2)\n"
            "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self.start)",
            init="self.start = mx.array([0])",
        ),
        "",
    ),
    "private window start written in place": (
        mask(
            f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n"
            "    self._start[:] = max(0, cache[0].offset + h.shape[1] - 2)\n"
            "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self._start)",
            init="self._start = mx.array([0])",
        ),
        "",
    ),
    "prompt length at prefill": (
        body(
            "if h.shape[1] > 1:\n    self.prompt = h.shape[1]\nh = h * (1 / self.prompt)",
            init="self.prompt = 1",
        ),
        "constant",
    ),
    # history
    "history-dependent constant": (
        body("HISTORY.append(h.shape[1])\nh = h + sum(HISTORY)", head="HISTORY = []"),
        "",
    ),
    "running average of hidden states": (
        body(
            "self.average = self.average * 0.9 + h.mean() * 0.1\nh = h - self.average",
            init="self.average = mx.array(0.0)",
        ),
        "average",
    ),
    "private running average": (
        body(
            "self._average = self._average * 0.9 + h.mean() * 0.1\nh = h - self._average",
            init="self._average = mx.array(0.0)",
        ),
        "",
    ),
    "running average in place": (
        body("self._average += h.mean()\nh = h - self._average", init="self._average = mx.array(0.0)"),
        "",
    ),
    "public running average in place": (
        body("self.average += h.mean()\nh = h - self.average", init="self.average = mx.array(0.0)"),
        "average",
    ),
    "running average in place, in the step only": (
        body(
            "if isinstance(cache[0].offset, mx.array):\n    self.average += h.mean()\nh = h - self.average",
            init="self.average = mx.array(0.0)",
        ),
        "average",
    ),
    "average in a closure": (
        body(
            "h = AVERAGE(h)",
            head="def _average():\n    kept = [mx.array(0.0)]\n\n    def update(h):\n        kept[0] = kept[0] * 0.9 + "
            "h.mean()\n        return h - kept[0]\n\n    return update\n\n\nAVERAGE = _average()",
        ),
        "",
    ),
    "last token kept": (
        body(
            "last, self._last = self._last, h[:, -1:]\nh = h if last is None else h + last",
            init="self._last = None",
        ),
        "",
    ),
    # chance and clocks
    "random noise": (body("h = h + mx.random.normal(h.shape)"), ""),
    "random scalar": (body("h = h * mx.random.uniform()"), ""),
    "dropout by Python": (body("import random\nh = h * random.random()"), ""),
    "numpy noise": (body("import numpy\nh = h + float(numpy.random.rand())"), ""),
    "clock": (body("import time\nh = h * (1 + time.perf_counter())"), ""),
}
"""Name: the replacements, and a word of the finding (empty where several findings are right)."""

LONG_WINDOW: Replacements = mask(
    f"fa_mask = {MAKE_MASK}\nif h.shape[1] > 1:\n"
    "    self.start = max(0, cache[0].offset + h.shape[1] - 1024)\n"
    "if isinstance(fa_mask, mx.array):\n    fa_mask = fa_mask & (mx.arange(fa_mask.shape[-1]) >= self.start)",
    init="self.start = 0",
)
"""A window start kept at prefill, of a window that none of the proof's short histories fills."""
