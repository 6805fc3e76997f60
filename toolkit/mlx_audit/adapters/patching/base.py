"""The base of the codemods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import libcst as cst


class Codemod(ABC):
    """Mends one mechanism in a model's source.

    A codemod is one small class in a file of `patching/codemods/`, where it is found; there is no list to extend. It
    matches a pattern of code, not a family, and leaves alone what it does not fully understand: a wrong patch is
    worse than none.
    """

    name: ClassVar[str]
    """Shown to the user; codemods are applied in the order of their names."""

    mends: ClassVar[tuple[str, ...]]
    """Codes of the source audit's hazards that are gone afterwards."""

    module: ClassVar[str] = ""
    """The only module that it is for, such as `rope_utils`; empty for every file."""

    @abstractmethod
    def apply(self, tree: cst.Module) -> cst.Module:
        """Return the mended module, or `tree` itself where there is nothing to mend, as after an earlier patch."""
