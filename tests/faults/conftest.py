"""Fixtures of the fault matrix."""

from tests.assets.conftest import light

__all__ = ["light"]
