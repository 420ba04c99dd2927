"""The embedded benchmark: MiniWoB++ pages, and the tiny models that were pretrained on them. Nothing of the method."""
