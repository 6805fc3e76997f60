"""A cache class of the model's own: its host numbers and its growth are found; a fixed one is clean."""

from __future__ import annotations

from pathlib import Path

from source_files import decoder, read

METHODS = "def make_cache(self):\n    return [OwnCache() for _ in self.layers]\n"


def _codes(tmp_path: Path, cls: str, **parts: str) -> set[tuple[str, str]]:
    report = read(tmp_path, decoder(top=cls, methods=METHODS, **parts))
    assert not report.unreadable
    return {
        (hazard.code, hazard.file.read_text().splitlines()[hazard.line - 1].strip())
        for hazard in report.hazards
    }


GROWING = """
class OwnCache:
    def __init__(self):
        self.offset = 0
        self.keys = None
        self.values = None

    def update_and_fetch(self, keys, values):
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self.offset += 1
        return keys, values

    def make_mask(self, N, **kwargs):
        return None
"""


def test_host_number_growth_and_the_class_itself(tmp_path: Path) -> None:
    found = _codes(tmp_path, GROWING)
    assert {code for code, _ in found} == {"SRC006"}
    lines = {line for _, line in found}
    assert "class OwnCache:" in lines
    assert "self.offset = 0" in lines
    assert "self.offset += 1" in lines
    assert "keys = mx.concatenate([self.keys, keys], axis=2)" in lines
    assert "q = self.rope(q, offset=cache.offset)" in lines


FIXED = """
class OwnCache:
    def __init__(self):
        self.offset = mx.array(0)
        self.keys = mx.zeros((1, 4, 64, 16))
        self.values = mx.zeros((1, 4, 64, 16))

    def update_and_fetch(self, keys, values):
        self.keys = mx.slice_update(self.keys, keys, self.offset, axes=[2])
        self.values = mx.slice_update(self.values, values, self.offset, axes=[2])
        self.offset = self.offset + 1
        return self.keys, self.values

    def make_mask(self, N, **kwargs):
        return mx.arange(64) <= self.offset
"""


def test_one_that_holds_arrays_of_fixed_size_is_clean(tmp_path: Path) -> None:
    assert _codes(tmp_path, FIXED) == set()


def test_host_read_of_an_array_that_it_holds(tmp_path: Path) -> None:
    found = _codes(tmp_path, FIXED, attention="n = int(cache.offset)")
    assert found == {("SRC001", "n = int(cache.offset)")}


def test_growth_by_a_list(tmp_path: Path) -> None:
    cls = FIXED.replace(
        "self.offset = mx.array(0)", "self.offset = mx.array(0)\n        self.seen = []"
    ).replace(
        "        return self.keys, self.values",
        "        self.seen.append(keys)\n        return self.keys, self.values",
    )
    assert ("SRC006", "self.seen.append(keys)") in _codes(tmp_path, cls)


def test_a_subclass_of_a_native_cache_keeps_what_is_native(tmp_path: Path) -> None:
    cls = "class OwnCache(KVCache):\n    def twice(self):\n        return int(self.offset)\n"
    found = _codes(tmp_path, cls, attention="n = cache.twice()")
    assert found == {("SRC001", "return int(self.offset)")}


def test_fixed_caches_that_the_model_makes_itself_come_first(tmp_path: Path) -> None:
    fixed = FIXED.replace("OwnCache", "FixedCache")
    methods = METHODS + (
        "def new_fixed_capacity_cache(self, max_tokens, *, batch_size=1):\n"
        "    return [FixedCache() for _ in self.layers]\n"
    )
    assert not read(tmp_path, decoder(top=GROWING + fixed, methods=methods)).hazards
