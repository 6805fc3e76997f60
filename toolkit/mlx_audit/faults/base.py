"""What a planted fault is: a small named patch, the check that it is for, and the stacks that it applies to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol


class Patch(Protocol):
    """What a fault is planted with; pytest's `monkeypatch` is one too."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        """Replace an attribute for as long as the fault is planted."""


class DoesNotApply(Exception):
    """The fault has nothing to hold on to in this model; the message says what is missing."""


@dataclass(frozen=True)
class Fault:
    """A deliberate defect of a cache, a mask, a step, a session or a model.

    Attributes:
        name: Stable, as in the kill matrix.
        by: Code of the check that it is for, which must fail in every stack that it applies to.
        needs: Traits that a stack must have, see `Topology.traits`; none where it applies everywhere.
        plant: Makes the patch. Its docstring says what somebody would have done wrong.
        undecided: Whether the check then says that it cannot decide, which keeps a verdict from `capable` too.
    """

    name: str
    by: str
    needs: frozenset[str]
    plant: Callable[..., None]
    undecided: bool = False

    def __call__(self, patch: Patch) -> None:
        """Plant it; who gave the patch undoes it."""
        self.plant(patch)

    @property
    def about(self) -> str:
        """What is wrong, in one line."""
        return inspect.cleandoc(self.plant.__doc__ or "").splitlines()[0].rstrip(".")

    def applies(self, traits: Collection[str]) -> bool:
        """Return whether a stack with these traits can have the defect."""
        return self.needs <= set(traits)


FAULTS: dict[str, Fault] = {}
"""Every fault by name; filled by the decorator below as the modules of this folder are imported."""


def fault(by: str, *, needs: str = "", undecided: bool = False) -> Callable[[Callable[..., None]], Fault]:
    """Make a fault of a function of a `Patch`, under its own name.

    Args:
        by: Code of the check that must fail.
        needs: Traits of the stacks that it applies to, with spaces between.
        undecided: Whether that check answers with `not-run` instead of `fail`.
    """

    def made(plant: Callable[..., None]) -> Fault:
        name = plant.__name__
        if name in FAULTS:
            raise ValueError(f"there are two faults of the name {name}")
        FAULTS[name] = Fault(name, by, frozenset(needs.split()), plant, undecided)
        return FAULTS[name]

    return made


class Planter:
    """A `Patch` that remembers what it replaced.

    Attributes:
        module: The model module of the stack, for faults of a model's own code.
    """

    def __init__(self, module: ModuleType | None = None) -> None:
        self._module = module
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def module(self) -> ModuleType:
        """The model module.

        Raises:
            DoesNotApply: there is none.
        """
        if self._module is None:
            raise DoesNotApply("no model module is given")
        return self._module

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        """Replace an attribute that exists, on a class, a module or an object."""
        getattr(target, name)
        self._undo.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            target, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, value)


_ABSENT = object()


@contextmanager
def planted(fault: Fault | None, module: ModuleType | None = None) -> Iterator[None]:
    """Plant a fault for a while; None plants nothing.

    Args:
        fault: What to plant.
        module: The model module of the stack.

    Raises:
        DoesNotApply: the model has no place for it.
    """
    patch = Planter(module)
    try:
        if fault is not None:
            fault.plant(patch)
        yield
    finally:
        patch.undo()
