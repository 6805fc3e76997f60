"""The child process of `convert`: `python -m mlx_audit.convert.child FD` makes a folder, and answers by a line.

Libraries that read a checkpoint may crash on it, or take all memory. That stays in here.
"""

from __future__ import annotations

import os
import sys

from mlx_audit.audit.child import channels, read_request, set_environment, write
from mlx_audit.convert.order import Answer, Order
from mlx_audit.errors import MlxAuditError, TargetError, describe, storable


def main() -> None:
    """Serve one order and end."""
    channel, orders = channels(int(sys.argv[1]))
    set_environment()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses PyTorch, which is not needed
    seal, line = read_request(orders)
    write(channel, seal, _answer(Order.model_validate_json(line)).model_dump_json().encode() + b"\n")
    os._exit(0)


def _answer(order: Order) -> Answer:
    try:
        return Answer(notes=_do(order))
    except MlxAuditError as error:
        return Answer(error=storable(error))
    except Exception as error:
        refused = TargetError("the checkpoint cannot be converted", where=order.text, found=describe(error))
        return Answer(error=storable(refused))


def _do(order: Order) -> list[str]:
    if order.work == "gguf":
        from mlx_audit.convert.gguf_folder import write_folder

        return write_folder(order)
    from mlx_audit.convert.folder import convert_folder, require_loads

    if order.work == "convert":
        convert_folder(order)
        require_loads(order.made)
    else:
        require_loads(order.source)
    return []


if __name__ == "__main__":
    main()
