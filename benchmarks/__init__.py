"""Performance benchmarks: `python -m benchmarks.NAME` writes benchmarks/baselines/NAME.json."""
