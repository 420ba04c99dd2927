"""The pools: planners write candidate plans, verifiers ground them, verified plans make D_k."""
