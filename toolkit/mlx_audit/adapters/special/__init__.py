"""Adapters written by hand, for families with cache classes of their own; each is named by the patch of its model."""
