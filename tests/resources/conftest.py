"""The light project, as in the tests of the assets."""

from tests.assets.conftest import light

__all__ = ["light"]
