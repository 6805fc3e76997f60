"""Each way of reading the position on the host is found at its line, and what stays in the graph is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from source_files import decoder, hazards, marked, read

HOST_READS = {
    "int": "n = int(cache[0].offset)  #! SRC001",
    "int of arithmetic": "n = int(offset + L)  #! SRC001",
    "float": "n = float(offset)  #! SRC001",
    "bool": "n = bool(offset)  #! SRC001",
    "round": "n = round(offset / 2)  #! SRC001",
    "item": "n = cache[0].offset.item()  #! SRC001",
    "item bound first": "read = offset.item\nn = read()  #! SRC001",
    "tolist": "n = mx.array(offset).tolist()  #! SRC001",
    "if": "if cache[0].offset > 0:  #! SRC001\n    h = h * 2",
    "if not": "if not offset:  #! SRC001\n    h = h * 2",
    "elif": "if self.args.window == 3:\n    h = h\nelif offset > 1:  #! SRC001 when needs\n    h = h * 2",
    "while": "n = offset\nwhile n > 8:  #! SRC001\n    n = n - 8",
    "assert": "assert offset < 100  #! SRC001",
    "ternary": "h = h * 2 if offset == 0 else h  #! SRC001",
    "and": "late = self.args.window is not None and offset > 3 and L  #! SRC001",
    "or": "start = offset or 0  #! SRC001",
    "chained comparison": "inside = 0 < offset < 8  #! SRC001",
    "comprehension": "h = sum([h for _ in range(2) if offset > 2])  #! SRC001",
    "match": "match offset:  #! SRC001\n    case 0:\n        h = h * 2",
    "membership": "first = offset in (0, 1)  #! SRC001",
    "range": "for t in range(offset, offset + L):  #! SRC001\n    h = h + t",
    "enumerate": "for t, _ in enumerate(self.layers, offset):  #! SRC001\n    h = h + t",
    "arange": "p = mx.arange(offset, offset + L)  #! SRC001",
    "arange by alias": "arange = mx.arange\np = arange(offset)  #! SRC001",
    "arange by partial": "p = functools.partial(mx.arange, offset)(offset + 1)  #! SRC001",
    "numpy arange": "p = mx.array(np.arange(cache[0].offset, cache[0].offset + L))  #! SRC001",
    "numpy asarray": "p = np.asarray(offset)  #! SRC001",
    "math": "h = h * math.log(offset + 1)  #! SRC001",
    "slice": "h = h + self.head.weight[offset : offset + L]  #! SRC001",
    "slice of data": "h = h[:, :offset]  #! SRC001",
    "slice object": "h = h[slice(0, offset)]  #! SRC001",
    "slice assigned": "h[:, offset : offset + 1] = 0  #! SRC001",
    "max": "n = max(offset, 1)  #! SRC001",
    "min of a list": "n = min([offset, 5])  #! SRC001",
    "f-string": "name = f'at {offset}'  #! SRC001",
    "format": "name = 'at {}'.format(offset)  #! SRC001",
    "percent": "name = 'at %d' % offset  #! SRC001",
    "print": "print(offset)  #! SRC001",
    "logging": "logging.info('at %s', offset)  #! SRC001",
    "shape": "pad = mx.zeros((B, offset, 4))  #! SRC001",
    "reshape": "pad = h.reshape(B, offset, -1)  #! SRC001",
    "list index": "table = [1.0, 2.0]\nh = h * table[offset]  #! SRC001",
    "dict index": "h = h * {0: 1.0}[offset]  #! SRC001",
    "eval": "mx.eval(offset)  #! SRC001",
    "size of the cache": "n = int(cache[0].size())  #! SRC001",
    "slot": "n = int(cache[0]._idx)  #! SRC001",
    "start position": "n = int(cache[0].start_position)  #! SRC001",
    "getattr": "n = int(getattr(cache[0], 'offset'))  #! SRC001",
    "walrus": "if (n := offset) > 2:  #! SRC001\n    h = h * n",
    "lambda": "late = lambda n: n > 3\nh = h * 2 if late(offset) else h  #! SRC001",
    "through a list": "offsets = [c.offset for c in cache]\nn = int(offsets[0])  #! SRC001",
    "through a dict": "known = {'offset': offset}\nn = int(known['offset'])  #! SRC001",
    "through a loop": "for c in cache:\n    n = int(c.offset)  #! SRC001",
    "through zip": "for layer, c in zip(self.layers, cache):\n    n = int(c.offset)  #! SRC001",
    "nested function": "def late():\n    return offset > 3\nif late():  #! SRC001\n    h = h * 2",
    "try": "try:\n    n = int(offset)  #! SRC001\nexcept TypeError:\n    n = 0",
    "with": "with mx.stream(mx.gpu):\n    n = int(offset)  #! SRC001",
    "repeated list": "pad = [0] * offset  #! SRC001",
    "islice": "first = list(itertools.islice(self.layers, offset))  #! SRC001",
    "meta state": "n = int(cache[0].meta_state)  #! SRC001",
    "mask": "n = int(mask.sum())  #! SRC001",
    "array made of it": "n = int(mx.maximum(mx.array(offset), 1))  #! SRC001",
}

DATA_READS = {
    "tolist": "ids = inputs.tolist()  #! SRC005",
    "item": "n = h.sum().item()  #! SRC005",
    "int": "n = int(inputs[0, 0])  #! SRC005",
    "numpy": "n = np.array(h)  #! SRC005",
    "if": "if mx.any(h > 0):  #! SRC005\n    h = h * 2",
    "eval": "mx.eval(h)  #! SRC005",
    "print": "print(h)  #! SRC005",
}

LENGTHS = {
    "rope": "q = self.rope(q, offset=keys.shape[2] - L)  #! SRC002",
    "rope by place": "q = self.rope(q, keys.shape[-2] - 1)  #! SRC002",
    "unpacked": "_, _, S, _ = keys.shape\nq = self.rope(q, offset=S - L)  #! SRC002",
    "arange": "S = keys.shape[2]\np = mx.arange(S - L, S)  #! SRC002",
    "shifted range": "p = mx.arange(L) + (keys.shape[2] - L)  #! SRC002",
    "block row": "blocks = (keys.shape[2] + 63) // 64\nrow = mx.arange(blocks - 1, blocks)  #! SRC002",
    "slice": "S = keys.shape[2]\nq = q + self.o_proj.weight[S - L : S]  #! SRC002",
    "index": "q = q + self.o_proj.weight[keys.shape[2] - 1]  #! SRC002",
    "of the cache": "q = self.rope(q, offset=cache.keys.shape[2])  #! SRC002",
    "of transposed keys": "q = self.rope(q, offset=keys.transpose(0, 1, 3, 2).shape[-1] - 1)  #! SRC002",
    "of scores": "scores = q @ keys.swapaxes(-1, -2)\np = mx.arange(scores.shape[-1] - L, 9)  #! SRC002",
    "last rows": "keys = keys[:, :, -8:]  #! SRC002",
    "last rows by ellipsis": "keys = keys[..., -self.heads :, :]  #! SRC002",
    "last row": "last = keys[:, :, -1]  #! SRC002",
    "all but the last row": "keys = keys[:, :, :-1]  #! SRC002",
    "last rows of a range": "p = mx.arange(keys.shape[2])[-L:]  #! SRC002",
    "last of the mask": "last = mask[..., -8:]  #! SRC002",
    "length of the mask": "q = self.rope(q, offset=mask.shape[-1] - L)  #! SRC002",
    "fast rope": "q = mx.fast.rope(q, 4, traditional=False, base=1.0, scale=1.0, offset=keys.shape[2])  #! SRC002",
}

MASKS = {
    "added": "scores = (q @ keys.swapaxes(-1, -2)) + mask  #! SRC003",
    "added in place": "scores = q @ keys.swapaxes(-1, -2)\nscores += mask  #! SRC003",
    "added after a cast": "scores = q @ keys.swapaxes(-1, -2)\nscores = scores + mask.astype(q.dtype)  #! SRC003",
    "added by function": "scores = mx.add(q @ keys.swapaxes(-1, -2), mask[..., None, :])  #! SRC003",
    "added if there is one": (
        "scores = q @ keys.swapaxes(-1, -2)\nif mask is not None:\n    scores = scores + mask  #! SRC003"
    ),
    "of the model's own": (
        "own = mx.arange(keys.shape[2]) <= mx.arange(L)[:, None] + offset\n"
        "scores = q @ keys.swapaxes(-1, -2) + own  #! SRC003"
    ),
}

MISSING_MASKS = {
    "attention": "q = mx.fast.scaled_dot_product_attention(q, keys, values, scale=1.0)  #! SRC003",
    "softmax": "w = mx.softmax((q @ keys.swapaxes(-1, -2)) * 0.5, axis=-1)  #! SRC003\nq = w @ values",
    "softmax by transpose": "w = mx.softmax(q @ keys.transpose(0, 1, 3, 2), axis=-1)  #! SRC003",
}

STATE = {
    "position": "self._position = offset + 1  #! SRC004",
    "data": "self.last = h  #! SRC004",
    "mask": "self.mask = mask  #! SRC004",
    "in place": "self.seen.append(h)  #! SRC004",
    "item": "self.seen[0] = h  #! SRC004",
    "global": "_MASKS['mask'] = mask  #! SRC004",
    "global list": "_SEEN.append(offset)  #! SRC004",
    "declared global": "global _LAST\n_LAST = h  #! SRC004",
    "class attribute": "Model.last = h  #! SRC004",
    "memo": "if self.kept is None:\n    self.kept = mask  #! SRC004",
    "memo by key": "if L not in _MASKS:\n    _MASKS[L] = mask  #! SRC004",
    "lru_cache": "mask = _mask(offset)  #! SRC004",
    "setattr": "setattr(self, 'last', h)  #! SRC004",
    "object.__setattr__": "object.__setattr__(self, 'last', h)  #! SRC004",
    "module item": "self['last'] = h  #! SRC004",
    "alias of a list": "seen = self.seen\nseen.append(h)  #! SRC004",
    "alias of a global": "seen = _SEEN\nseen.append(h)  #! SRC004",
    "counter": "self.count += 1  #! SRC004",
    "counter in parts": "n = self.count + L\nself.count = n  #! SRC004",
    "cache": "self.last_cache = cache  #! SRC004",
    "on the cache": "cache[0].steps = offset  #! SRC004",
    "of a layer": "self.layers[0].self_attn.last = offset  #! SRC004",
    "class list": "self.shared.append(offset)  #! SRC004",
}
STATE_TOP = (
    "_MASKS = {}\n_SEEN = []\n_LAST = None\n@functools.lru_cache\ndef _mask(n):\n    return mx.zeros((4,))\n"
)

SAFE = {
    "arange and offset": "p = mx.arange(L) + offset\nh = h + self.embed(p)",
    "array of offset": "p = mx.array(offset)[..., None] + mx.arange(L)",
    "mx.maximum": "n = mx.maximum(offset, 1)",
    "mx.where": "h = mx.where(offset > 3, h, 0)",
    "mx.take": "h = h + mx.take(self.head.weight, offset, axis=0)",
    "array index": "h = h + self.head.weight[offset]",
    "host arithmetic": "h = h * mx.log(mx.floor((offset + L) / 8) + 1)",
    "is None": "offset = 0 if cache[0] is None else cache[0].offset\nif offset is not None:\n    h = h * 1",
    "no cache": "if cache is None:\n    n = int(offset)",
    "prompt only": "if L > 1:\n    n = int(offset)",
    "prompt only, by shape": "if h.shape[1] != 1:\n    n = int(offset)\nif x_is_long(h):\n    n = int(offset)",
    "prompt only, returned": "if L == 1:\n    return self.head(h)\nn = int(offset)",
    "mask is text": "if isinstance(mask, str):\n    n = int(offset)\nif mask == 'causal':\n    n = int(offset)",
    "host integers only": "if isinstance(offset, int):\n    n = range(offset)",
    "training": "if self.training:\n    n = int(offset)",
    "weights kept": "self.kept = self.head.weight * 2",
    "shape as text": "name = f'{L} {h.shape}'",
    "lengths": "n = max(L, 4)\nfor i in range(L):\n    h = h * 1",
    "object in the step": "note = Note(h)\nnote.last = offset\nh = h + note.last",
    "update": "cache[0].keys = h",
    "dead code": "def never():\n    return int(offset)",
}
SAFE_TOP = """
class Note:
    def __init__(self, x):
        self.x = x

def x_is_long(x):
    return x.shape[1] > 1

class NeverBuilt(nn.Module):
    def __call__(self, x, offset):
        return x[:int(offset)]
"""

SAFE_ATTENTION = {
    "length as upper bound": "p = mx.arange(keys.shape[2])",
    "mask cut to the keys": "mask = mask[..., : keys.shape[-2]]\nmask = mask[..., -keys.shape[2] :]",
    "branch on the length": "if keys.shape[2] > 8:\n    q = q * 1",
    "mask applied": "s = mx.where(mask, q @ keys.swapaxes(-1, -2), -1e9)",
    "mask by its type": (
        "s = q @ keys.swapaxes(-1, -2)\n"
        "if mask.dtype == mx.bool_:\n    s = mx.where(mask, s, -1e9)\nelse:\n    s = s + mask"
    ),
    "mask made additive": "s = q @ keys.swapaxes(-1, -2) + mx.where(mask, 0.0, -1e9)",
    "mask made additive by arithmetic": "s = q @ keys.swapaxes(-1, -2) + (1 - mask.astype(q.dtype)) * -1e9",
    "mask in part": "s = mx.softmax(mx.where(mask, q @ keys.swapaxes(-1, -2), -1e9), axis=-1)",
    "additive mask": "s = mx.softmax(q @ keys.swapaxes(-1, -2) + mx.where(mask, 0.0, -1e9), axis=-1)",
    "softmax over experts": "s = mx.softmax(self.o_proj(x), axis=-1)",
    "first rows": "keys = keys[:, :, : keys.shape[2]]",
    "last features": "keys = keys[..., -8:]",
    "masks joined": "mask = mask & (mx.arange(keys.shape[2]) >= offset - 8)",
}


FUNCTIONS = {
    "function": ("n = whole(offset)", "def whole(x):\n    return int(x)  #! SRC001\n"),
    "by name": ("n = whole(x=offset)", "def whole(a=1, *, x=0):\n    return int(x)  #! SRC001\n"),
    "star": ("n = whole(*[offset])", "def whole(x):\n    return int(x)  #! SRC001\n"),
    "double star": ("n = whole(**{'x': offset})", "def whole(x):\n    return int(x)  #! SRC001\n"),
    "collected": ("n = whole(offset)", "def whole(*xs):\n    return int(xs[0])  #! SRC001\n"),
    "passed on": (
        "n = whole(offset)",
        "def half(x):\n    return int(x)  #! SRC001\n\ndef whole(x):\n    return half(x / 2)\n",
    ),
    "generator": ("n = next(whole(offset))", "def whole(x):\n    yield int(x)  #! SRC001\n"),
    "compiled": ("n = whole(offset)", "@mx.compile\ndef whole(x):\n    return int(x)  #! SRC001\n"),
    "compiled by call": (
        "n = whole(offset)",
        "def part(x):\n    return int(x)  #! SRC001\nwhole = mx.compile(part)\n",
    ),
    "recursive": ("n = whole(offset)", "def whole(x):\n    return int(x) + whole(x - 1)  #! SRC001\n"),
    "mapped": ("n = list(map(int, [offset]))  #! SRC001", ""),
    "mapped function": ("n = list(map(whole, [offset]))", "def whole(x):\n    return int(x)  #! SRC001\n"),
    "filled list": (
        "seen = []\nfill(seen, offset)\nn = int(seen[0])  #! SRC001",
        "def fill(to, x):\n    to.append(x)\n",
    ),
    "filled dict": (
        "known = {}\nfill(x=offset, to=known)\nn = int(known['x'])  #! SRC001",
        "def fill(to, x):\n    if x is None:\n        return\n    to['x'] = x\n",
    ),
    "filled list of a module": ("fill(self.seen, offset)", "def fill(to, x):\n    to.append(x)  #! SRC004\n"),
    "default list": ("remember(h)", "def remember(x, seen=[]):\n    seen.append(x)  #! SRC004\n"),
    "class": (
        "n = Reader(offset).n",
        "class Reader:\n    def __init__(self, x):\n        self.n = int(x)  #! SRC001\n",
    ),
    "property": (
        "n = Reader(offset).n",
        (
            "class Reader:\n    def __init__(self, x):\n        self.x = x\n"
            "    @property\n    def n(self):\n        return int(self.x)  #! SRC001\n"
        ),
    ),
    "static method": (
        "n = Reader.n(offset)",
        "class Reader:\n    @staticmethod\n    def n(x):\n        return int(x)  #! SRC001\n",
    ),
    "inherited": (
        "n = Sub().n(offset)",
        "class Reader:\n    def n(self, x):\n        return int(x)  #! SRC001\n\nclass Sub(Reader):\n    pass\n",
    ),
    "super": (
        "n = Sub().n(offset)",
        (
            "class Reader:\n    def n(self, x):\n        return int(x)  #! SRC001\n\n"
            "class Sub(Reader):\n    def n(self, x):\n        return super().n(x)\n"
        ),
    ),
}


def _case(name: str, **parts: str) -> object:
    return pytest.param(decoder(**parts), id=name)


@pytest.mark.parametrize(
    "source",
    [
        *[
            _case(f"read: {name}", model=code, top="import itertools")
            for name, code in HOST_READS.items()
            if "needs" not in code
        ],
        *[_case(f"data: {name}", model=code) for name, code in DATA_READS.items()],
        *[_case(f"length: {name}", attention=code) for name, code in LENGTHS.items()],
        *[_case(f"mask: {name}", attention=code) for name, code in MASKS.items()],
        *[_case(f"no mask: {name}", attention=code) for name, code in MISSING_MASKS.items()],
        *[
            _case(
                f"state: {name}",
                model=code,
                top=STATE_TOP,
                model_init="self.seen = []\nself.kept = None\nself.count = 0",
                methods="shared = []",
            )
            for name, code in STATE.items()
        ],
        *[
            _case(f"called: {name}", model=code, top=top, model_init="self.seen = []")
            for name, (code, top) in FUNCTIONS.items()
        ],
        *[_case(f"safe: {name}", model=code, top=SAFE_TOP) for name, code in SAFE.items()],
        *[_case(f"safe: {name}", attention=code) for name, code in SAFE_ATTENTION.items()],
    ],
)
def test_hazards_are_found_where_they_are_and_nowhere_else(tmp_path: Path, source: str) -> None:
    report = read(tmp_path, source)
    assert not report.unreadable
    assert hazards(report) == marked(source)
