"""Performance benchmarks: each one command, `python -m benchmarks.NAME`, that leaves benchmarks/baselines/NAME.json."""
