"""Co-EPG (arXiv 2511.10705): a planner and a grounder that improve each other. The method; imports no Dagster."""
