"""Reading a model's source, without importing or running it: who consumes the position, and how."""

from mlx_audit.source.reading import read_source
from mlx_audit.source.report import Consumer, SourceReport
from mlx_audit.source.stepping import OWN_CACHE

__all__ = ["OWN_CACHE", "Consumer", "SourceReport", "read_source"]
