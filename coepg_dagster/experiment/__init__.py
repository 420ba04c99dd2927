"""Experiment files (YAML) as pydantic models, and the versions that follow from them."""
