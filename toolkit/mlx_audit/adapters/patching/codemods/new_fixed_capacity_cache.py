"""Gives a model the method that makes its fixed-capacity caches."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from mlx_audit.adapters.patching.base import Codemod

_METHOD = "new_fixed_capacity_cache"


class NewFixedCapacityCache(Codemod):
    """Adds `new_fixed_capacity_cache` after `make_cache`, or at the end of class Model where there is none.

    mlx-audit is imported inside, so the model file also works where it is not installed. A family that needs another
    adapter subclasses this with its `module`, `home` and `adapter`, and a name that comes before this one's: a model
    that has the method already keeps it.
    """

    name = _METHOD
    mends: ClassVar[tuple[str, ...]] = ()

    home: ClassVar[str] = "mlx_audit.adapters"
    """The module that the adapter is imported from."""

    adapter: ClassVar[str] = "GenericAdapter"
    """A class that takes the model."""

    def apply(self, tree: cst.Module) -> cst.Module:
        body = [
            self._with_method(statement)
            if isinstance(statement, cst.ClassDef) and statement.name.value == "Model"
            else statement
            for statement in tree.body
        ]
        return tree if body == list(tree.body) else tree.with_changes(body=body)

    def _with_method(self, model: cst.ClassDef) -> cst.ClassDef:
        if not isinstance(model.body, cst.IndentedBlock):
            return model
        statements = model.body.body
        names = [s.name.value if isinstance(s, cst.FunctionDef) else "" for s in statements]
        if _METHOD in names:
            return model
        place = names.index("make_cache") + 1 if "make_cache" in names else len(names)
        mended = [*statements[:place], self._method(), *statements[place:]]
        return model.with_changes(body=model.body.with_changes(body=mended))

    def _method(self) -> cst.BaseStatement:
        method = cst.parse_statement(
            f"def {_METHOD}(self, max_tokens, *, batch_size=1):\n"
            f"    from {self.home} import {self.adapter}\n"
            "\n"
            f"    return {self.adapter}(self).{_METHOD}(\n"
            "        max_tokens, batch_size=batch_size\n"
            "    )\n"
        )
        assert isinstance(method, cst.FunctionDef)
        return method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
