"""One inference protocol (`engine`), its engines, and the two agents that speak through it (`agents`)."""
