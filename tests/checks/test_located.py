"""Localisation: for planted faults of many kinds, the right step, layer, slot and consumer; in one layer only, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from audited import check, mutated, new_subject
from kind_models import KINDS, kind_subject, new_kind_subject
from mlx_audit.caches import FixedCapacityKVCache as Linear
from mlx_audit.caches.arrays import FixedCapacityArraysCache as Arrays
from mlx_audit.caches.quantized import FixedCapacityQuantizedCache as Quantized
from mlx_audit.caches.ring import RingCache as Ring
from mlx_audit.checks.base import execute
from mlx_audit.checks.located import Location, locate
from mlx_audit.checks.scenario import Scenario
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import DecodeStep
from mlx_audit.faults import FAULTS

USUAL = Scenario(13, 4)


def subject_of(kind: str) -> Subject:
    return kind_subject(kind) if kind in KINDS else new_subject()


def found(location: Location) -> tuple[Any, ...]:
    return location.step, location.layer, location.slot, location.consumer


PLANTED = {
    ("linear", "frozen_write"): (1, "caches[0]", 13, "write"),
    ("linear", "write_one_late"): (1, "caches[0]", 13, "write"),
    ("linear", "write_dropped_from_16"): (4, "caches[0]", 16, "write"),
    ("linear", "values_never_written"): (1, "caches[0]", 13, "write"),
    ("linear", "two_slots_written"): (1, "caches[0]", 13, "write"),
    ("linear", "position_stands_still"): (1, "caches[0]", 14, "write"),
    ("linear", "caches_in_another_order"): (1, "caches[0]", 13, "write"),
    ("linear", "rope_one_late"): (1, "caches[0]", 13, "RoPE"),
    ("linear", "frozen_rope"): (1, "caches[0]", 13, "RoPE"),
    ("linear", "rope_shifted_from_the_start"): (0, "caches[0]", 0, "RoPE"),
    ("linear", "mask_shows_one_ahead"): (1, "caches[0]", 14, "mask"),
    ("linear", "mask_forgets_the_first_token"): (1, "caches[0]", 0, "mask"),
    ("linear", "mask_hides_the_token_itself"): (1, "caches[0]", 13, "mask"),
    ("linear", "frozen_mask"): (1, "caches[0]", 6, "mask"),
    ("linear", "fetched_zeros"): (1, "caches[0]", None, "attention"),
    ("linear", "cache_in_half_precision"): (0, "caches[0]", 0, "write"),
    ("linear", "native_cache_emptied"): (None, None, None, "outside the step"),
    ("rotating", "ring_turns_one_early"): (1, "caches[0]", 5, "write"),
    ("rotating", "ring_write_one_late"): (1, "caches[0]", 5, "write"),
    ("rotating", "ring_window_too_narrow"): (1, "caches[0]", 6, "mask"),
    ("rotating", "ring_handed_over_in_slot_order"): (0, "caches[0]", None, "outside the step"),
    ("keeping", "ring_forgets_what_it_keeps"): (1, "caches[0]", 0, "mask"),
    ("chunked", "chunk_edge_one_late"): (1, "caches[0]", 0, "mask"),
    ("quantized", "quantized_write_one_early"): (1, "caches[0]", 13, "write"),
    ("arrays", "recurrent_state_not_carried"): (1, "caches[0]", 0, "state"),
    ("arrays", "recurrent_state_half_carried"): (1, "caches[0]", 1, "state"),
    ("composite", "recurrent_state_half_carried"): (1, "caches[0][0]", 1, "state"),
    ("composite", "rope_one_late"): (1, "caches[0][1]", 13, "RoPE"),
}


@pytest.mark.parametrize(("kind", "fault"), PLANTED)
def test_names_step_layer_slot_and_consumer(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    location = locate(subject_of(kind), USUAL)
    assert found(location) == PLANTED[kind, fault], location.text


IN_ONE_LAYER = {
    ("linear", "write_one_late", Linear, "update_and_fetch", 2): (1, "caches[2]", 13, "write"),
    ("linear", "frozen_write", Linear, "update_and_fetch", 1): (1, "caches[1]", 13, "write"),
    ("linear", "values_never_written", Linear, "update_and_fetch", 3): (1, "caches[3]", 13, "write"),
    ("linear", "rope_one_late", Linear, "offset", 1): (1, "caches[1]", 13, "RoPE"),
    ("linear", "fetched_zeros", Linear, "update_and_fetch", 2): (1, "caches[2]", None, "attention"),
    ("rotating", "ring_write_one_late", Ring, "_written", 2): (1, "caches[2]", 5, "write"),
    ("quantized", "quantized_write_one_early", Quantized, "update_and_fetch", 3): (
        1,
        "caches[3]",
        13,
        "write",
    ),
    ("arrays", "recurrent_state_half_carried", Arrays, "__setitem__", 2): (1, "caches[2]", 1, "state"),
}


@pytest.mark.parametrize(("kind", "fault", "cls", "name", "layer"), IN_ONE_LAYER)
def test_names_the_one_layer_that_is_wrong(
    kind: str, fault: str, cls: type[Any], name: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(kind)
    _plant_in(layer, cls, name, fault, monkeypatch)
    location = locate(subject, USUAL)
    assert found(location) == IN_ONE_LAYER[kind, fault, cls, name, layer], location.text


def _plant_in(layer: int, cls: type[Any], name: str, fault: str, patch: pytest.MonkeyPatch) -> None:
    """Plant a fault that replaces one attribute of a cache class, in the cache of one entry alone."""
    init, own = DecodeStep.__init__, getattr(cls, name)

    def labelled(self: DecodeStep, model: Any, caches: Any) -> None:
        init(self, model, caches)
        for index, cache in enumerate(self.caches):
            for part in cache.parts:
                part.entry = index  # type: ignore[attr-defined]

    FAULTS[fault](patch)
    wrong = getattr(cls, name)

    def chosen(self: Any) -> Any:
        return wrong if getattr(self, "entry", None) == layer else own

    if isinstance(own, property):
        patch.setattr(cls, name, property(lambda self: chosen(self).fget(self)))
    else:
        patch.setattr(cls, name, lambda self, *given, **options: chosen(self)(self, *given, **options))
    patch.setattr(DecodeStep, "__init__", labelled)


MODEL_CODE = {
    "the third layer's queries are turned by the width of the keys": (
        "            keys, values = cache.update_and_fetch(keys, values)\n",
        (
            "            keys, values = cache.update_and_fetch(keys, values)\n"
            "            if self.wrong and queries.shape[2] == 1:\n"
            "                queries = self.rope(queries, offset=keys.shape[2])\n"
        ),
        (1, "caches[2]", None, "attention"),
    ),
    "the third layer's keys are turned by the number of slots": (
        "            keys = self.rope(keys, offset=cache.offset)\n",
        (
            "            held = cache.keys.shape[2] if self.wrong and keys.shape[2] == 1 else cache.offset\n"
            "            keys = self.rope(keys, offset=held)\n"
        ),
        (1, "caches[2]", 13, "RoPE"),
    ),
    "the third layer sees the whole buffer": (
        "        output = scaled_dot_product_attention(\n",
        (
            "        if self.wrong and queries.shape[2] == 1:\n"
            "            mask = None\n"
            "        output = scaled_dot_product_attention(\n"
        ),
        (1, "caches[2]", None, "attention"),
    ),
    "the third layer adds its position to what it makes": (
        "        r = self.self_attn(self.input_layernorm(x), mask, cache)\n",
        (
            "        r = self.self_attn(self.input_layernorm(x), mask, cache)\n"
            "        if self.self_attn.wrong and cache and not isinstance(cache.offset, int):\n"
            "            r = r + mx.mean(cache.offset.astype(r.dtype))\n"
        ),
        (1, "caches[2]", None, "attention"),
    ),
    "the third layer reads the position on the host": (
        "            keys = self.rope(keys, offset=cache.offset)\n",
        "            keys = self.rope(keys, offset=int(cache.offset) if self.wrong else cache.offset)\n",
        (1, "caches[2]", None, None),
    ),
}


@pytest.mark.parametrize("what", MODEL_CODE)
def test_faults_of_a_model_s_own_code(what: str, tmp_path: Path) -> None:
    old, new, wanted = MODEL_CODE[what]
    module = mutated(
        tmp_path,
        (old, new),
        (
            "        self.scale = head_dim**-0.5\n",
            "        self.scale = head_dim**-0.5\n        self.wrong = False\n",
        ),
        (
            "        self.norm = nn.RMSNorm(",
            "        self.layers[2].self_attn.wrong = True\n        self.norm = nn.RMSNorm(",
        ),
    )
    location = locate(new_subject(module=module), USUAL)
    assert found(location) == wanted, location.text


@pytest.mark.parametrize("kind", ["linear", *KINDS])
def test_healthy_stacks_show_nothing(kind: str) -> None:
    location = locate(subject_of(kind), Scenario(7, 5, 20, chunk=3))
    assert found(location) == (None, None, None, "outside the step"), location.text


def test_a_short_prompt_shows_the_unwritten_slots_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["ring_shows_unwritten_slots"](monkeypatch)
    location = locate(kind_subject("rotating"), Scenario(3, 2))
    assert location.text == "step 1, caches[0], slot 4: mask (a slot that holds no token yet is shown)"


def test_a_session_that_feeds_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_audit.decode import CompiledDecodeSession as Session

    own = Session._commit

    def commit(self: Session, logits: mx.array, state: Any, count: int) -> None:
        own(
            self,
            logits,
            [[mx.array(array) * 2 if array.ndim == 4 else array for array in arrays] for arrays in state],
            count,
        )

    monkeypatch.setattr(Session, "_commit", commit)
    location = locate(new_subject(), USUAL)
    assert found(location)[3] == "outside the step"
    assert location.step == 1


def test_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no prompt today")

    from mlx_audit.decode import CompiledDecodeSession as Session

    monkeypatch.setattr(Session, "prefill", refuse)
    assert "no prompt today" in locate(new_subject(), USUAL).text


class TestInResults:
    """A failed check carries the location in its text, in `where` if there is none, and in its figures."""

    def test_text_and_figures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FAULTS["write_one_late"](monkeypatch)
        result = execute(check("STA001"), new_subject(), {}, locate=True)
        assert result.reason.endswith(
            "; first divergence: step 1, caches[0], slot 13: write (slot 14 was written instead)"
        )
        assert result.where == "step 1 of the first session, caches[0]"
        located = result.figures["located"]
        assert (located["step"], located["layer"], located["slot"]) == (1, "caches[0]", 13)
        assert located["scenario"]["prompt"] == 13

    @pytest.mark.parametrize(
        ("code", "fault", "text"),
        [
            ("PAR001", "rope_one_late", "step 1, caches[0], slot 13: RoPE"),
            ("PAR003", "mask_shows_one_ahead", "step 1, caches[0], slot 14: mask"),
            ("PAR004", "mask_of_a_chunk_shows_one_ahead", "first divergence: outside the step"),
            ("STA005", "native_cache_emptied", "first divergence: outside the step"),
            ("MSK003", "scaled_by_the_capacity", "caches[0]"),
        ],
    )
    def test_each_check_that_compares(
        self, code: str, fault: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FAULTS[fault](monkeypatch)
        result = execute(check(code), new_subject(), {}, locate=True)
        assert result.status == "fail"
        assert text in result.reason

    def test_not_looked_for_unless_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FAULTS["write_one_late"](monkeypatch)
        result = execute(check("STA001"), new_kind_subject("quantized"), {})
        assert result.status == "pass", "the fault is planted in another kind"
        result = execute(check("STA001"), new_subject(), {})
        assert "divergence" not in result.reason
        assert "located" not in result.figures
