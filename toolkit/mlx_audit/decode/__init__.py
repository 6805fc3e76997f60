"""The pure decode step and the session that compiles it."""

from mlx_audit.decode.counted import CountedCompile
from mlx_audit.decode.session import CompiledDecodeSession
from mlx_audit.decode.state import check_state_tree, require_fixed_capacity
from mlx_audit.decode.step import DecodeStep, State, run

__all__ = [
    "CompiledDecodeSession",
    "CountedCompile",
    "DecodeStep",
    "State",
    "check_state_tree",
    "require_fixed_capacity",
    "run",
]
