"""Where compiled decoding leaves eager decoding first: step, layer, slot, and who used the position wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.caches import FixedCapacityCache
from mlx_audit.checks.content import leaves, readable, rounding
from mlx_audit.checks.judged import Finding, Threshold, held_tokens, judge_mask, judge_write
from mlx_audit.checks.parts import Part, PartSpec, parts_of
from mlx_audit.checks.recorded import LayerCall, RecordedStep, recording
from mlx_audit.checks.runs import session_for
from mlx_audit.checks.scenario import Scenario
from mlx_audit.checks.stand_ins import stand_ins_for
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession, DecodeStep, State, run
from mlx_audit.decode.ladder import rung_for
from mlx_audit.errors import describe

MOST_STEPS = 64
"""Steps that are followed at most."""


@dataclass(frozen=True)
class Location:
    """Where two runs part; whatever is None is not known, and `detail` says why.

    Attributes:
        step: Compiled step from 1 on; 0 is the prompt and its adoption.
        layer: The layer's cache, as `caches[2]` or `caches[2][0]`; `layers[2]` where it has none.
        slot: Slot of the buffer, or the array of a recurrent state.
        consumer: `write`, `RoPE`, `mask`, `attention`, `state`, `layer` or `outside the step`.
        detail: What was found there.
    """

    step: int | None = None
    layer: str | None = None
    slot: int | None = None
    consumer: str | None = None
    detail: str = ""

    @property
    def place(self) -> str:
        """Step, layer and slot, as far as they are known."""
        slot = None if self.slot is None else f"{'array' if self.consumer == 'state' else 'slot'} {self.slot}"
        step = None if self.step is None else f"step {self.step}" if self.step else "the prompt"
        return ", ".join(word for word in (step, self.layer, slot) if word)

    @property
    def text(self) -> str:
        """All of it in one line: `step 2, caches[1], slot 14: write (slot 3 was written instead)`."""
        known = ": ".join(word for word in (self.place, self.consumer) if word) or "not found"
        return f"{known} ({self.detail})" if self.detail else known

    def figures(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def locate(subject: Subject, scenario: Scenario) -> Location:
    """Run a scenario eagerly and compiled and say where they part first; raises nothing.

    Args:
        subject: What to run.
        scenario: What was running when a check failed.
    """
    try:
        with stand_ins_for(scenario.dtype):
            return _Search(scenario.subject(subject), scenario).run()
    except Exception as error:
        return Location(detail=f"looking for it raised {describe(error)}")


@dataclass
class _Seen:
    """What eager decoding made of one token, or of the prompt.

    Attributes:
        logits: `[1, vocabulary]`.
        calls: Of its layers, in order; none for the prompt.
        held: What each cache that is not composite holds after it, in the order of time.
        slack: What of it rounding may move.
    """

    logits: mx.array
    calls: list[LayerCall]
    held: list[list[mx.array]]
    slack: list[list[mx.array | float]]


class _Search:
    """Follows one scenario; eager decoding runs first, whole, as in the checks."""

    def __init__(self, subject: Subject, scenario: Scenario) -> None:
        self.subject, self.model, self.scenario = subject, subject.model, scenario
        self.prompt, forced = scenario.tokens(subject)
        self.forced = forced[:MOST_STEPS]
        self.apart = Threshold.of(subject)
        self.entries: dict[int, int] = {}
        """From a layer to its entry of the caches."""
        self.specs: list[PartSpec] = []
        self.seen = self._eagerly()

    def run(self) -> Location:
        """Return where the runs part."""
        session = self._session()
        found = self._adopted(session, 0) or self._step_by_step(session) or self._in_session()
        return found or Location(
            consumer="outside the step",
            detail="a session that takes these steps agrees with eager decoding: look at what else the check does",
        )

    def _session(self) -> CompiledDecodeSession:
        scenario = self.scenario
        session = session_for(self.subject, scenario.room, prefill_step_size=scenario.piece)
        session.prefill([self.prompt])
        return session

    # Eager decoding.

    def _eagerly(self) -> list[_Seen]:
        natives: list[Any] = make_prompt_cache(self.model)
        piece = self.scenario.piece
        for start in range(0, len(self.prompt), piece):
            logits = self._feed(self.prompt[start : start + piece], natives)
        self.specs = [PartSpec.of(native) for native in leaves(natives)]
        seen = [self._noted(logits, [], natives)]
        for token in self.forced:
            with recording(self.model) as calls:
                logits = self._feed([token], natives)
            self._map(calls, natives)
            seen.append(self._noted(logits, calls, natives))
        return seen

    def _feed(self, tokens: list[int], natives: list[Any]) -> mx.array:
        logits = run(self.model, mx.array([tokens], mx.int32), natives)
        mx.eval(logits)
        return logits

    def _noted(self, logits: mx.array, calls: list[LayerCall], natives: list[Any]) -> _Seen:
        own = leaves(natives)
        held, slack = [readable(native) for native in own], [rounding(native) for native in own]
        mx.eval(logits, [[*call.arrays, call.output] for call in calls], held)
        return _Seen(logits, calls, held, slack)

    def _map(self, calls: list[LayerCall], natives: list[Any]) -> None:
        for call in calls:
            given = [i for i, native in enumerate(natives) if any(item is native for item in call.caches)]
            if given or len(natives) == len(calls):
                self.entries[call.layer] = given[0] if given else call.layer
            call.caches = []

    # Compiled steps.

    def _step_by_step(self, session: CompiledDecodeSession) -> Location | None:
        steps: dict[int, RecordedStep] = {}
        whole, state = DecodeStep(self.model, session.caches), session.state
        for number, token in enumerate(self.forced, start=1):
            rung = rung_for(len(self.prompt) + number, session.capacity)
            step = steps.setdefault(rung, RecordedStep(whole.at_rung(rung)))
            try:
                logits, new, calls = step(state, token)
            except Exception as error:
                layer = self._name(step.reached) if step.reached < len(self.seen[number].calls) else None
                return Location(number, layer, detail=f"the compiled step raises {describe(error)}")
            before, after = _over(step.step, state), _over(step.step, new)
            found = self._parted(number, before, after, logits, calls)
            if found is not None:
                return found
            state = new
        return None

    def _parted(
        self,
        number: int,
        before: list[FixedCapacityCache],
        after: list[FixedCapacityCache],
        logits: mx.array,
        calls: list[LayerCall],
    ) -> Location | None:
        """Return where one step parts from eager decoding, going through the layers in order."""
        want, old = self.seen[number], parts_of(before, self.specs)
        new = parts_of(after, self.specs)
        waiting = list(range(len(new)))
        for got, eager in zip(calls, want.calls, strict=True):
            if self.apart(got.arrays[0], eager.arrays[0]):
                detail = "what it is given differs, though all before it agrees"
                return Location(number, self._name(got.layer), None, "layer", detail)
            own = [index for index in waiting if _entry(new[index]) == self.entries.get(got.layer)]
            for index in own:
                waiting.remove(index)
                if found := self._written(number, old[index], new[index], want, index):
                    return found
            if self.apart(got.output, eager.output):
                reading = [part for part in old if _entry(part) == self.entries.get(got.layer)]
                return self._misread(number, got, reading)
        for index in waiting:
            if found := self._written(number, old[index], new[index], want, index):
                return found
        if self.apart(logits, want.logits):
            return Location(number, None, None, "layer", "what follows the last layer differs")
        return None

    def _written(self, number: int, old: Part, new: Part, want: _Seen, index: int) -> Location | None:
        position = len(self.prompt) + number - 1
        found = judge_write(old, new, want.held[index], want.slack[index], position, self.apart)
        return _located(number, new.name, found) if found is not None else None

    def _misread(self, number: int, call: LayerCall, parts: Sequence[Part]) -> Location:
        """Return who made a layer's output differ although its caches and its input agree."""
        slotted = [part for part in parts if part.slotted]
        if not slotted:
            detail = "its input and its state agree, its output differs"
            return Location(number, self._name(call.layer), None, "layer", detail)
        position = len(self.prompt) + number - 1
        for part in slotted:
            if found := judge_mask(part, call.arrays[1:], position):
                return _located(number, part.name, found)
        detail = "what is held and what the mask shows agree, the layer's output differs"
        return Location(number, slotted[0].name, None, "attention", detail)

    def _name(self, layer: int) -> str:
        entry = self.entries.get(layer)
        return f"layers[{layer}]" if entry is None else f"caches[{entry}]"

    # The session around the step.

    def _adopted(self, session: CompiledDecodeSession, number: int) -> Location | None:
        """Return where what a session holds after the prompt differs."""
        want, position = self.seen[number], len(self.prompt) + number
        for index, part in enumerate(parts_of(session.caches, self.specs)):
            found = held_tokens(part, want.held[index], want.slack[index], position, self.apart)
            if found is not None:
                return _located(number, part.name, found)
        return None

    def _in_session(self) -> Location | None:
        """Return where a session leaves eager decoding, whose compiled step alone does not."""
        session = self._session()
        for number, token in enumerate([None, *self.forced]):
            if token is not None:
                logits = session.step([token])
                if self.apart(logits, self.seen[number].logits):
                    detail = "the step agrees with eager decoding, the session does not"
                    return Location(number, None, None, "outside the step", detail)
            if found := self._adopted(session, number):
                return Location(number, found.layer, found.slot, "outside the step", found.detail)
            if found := self._handed_over(session, number):
                return found
        return None

    def _handed_over(self, session: CompiledDecodeSession, number: int) -> Location | None:
        own = leaves(cache.to_native() for cache in session.caches)
        for index, part in enumerate(parts_of(session.caches, self.specs)):
            got, want = readable(own[index]), self.seen[number].held[index]
            pairs = list(zip(got, want, self.seen[number].slack[index], strict=False))
            if len(got) != len(want) or any(self.apart(*pair) for pair in pairs):
                detail = "what it holds is right, what it hands over as mlx-lm's cache is not"
                return Location(number, part.name, None, "outside the step", detail)
        return None


def _over(step: DecodeStep, state: State) -> list[FixedCapacityCache]:
    return [cache.with_state(arrays) for cache, arrays in zip(step.caches, state, strict=True)]


def _entry(part: Part) -> int:
    return int(part.name.removeprefix("caches[").partition("]")[0])


def _located(number: int, name: str, found: Finding) -> Location:
    return Location(number, name, found.slot, found.consumer, found.detail)
