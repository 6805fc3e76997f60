"""Checks: one file a family of claims, one small class a claim."""
