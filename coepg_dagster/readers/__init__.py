"""Public datasets in, tables of steps (STEP_SCHEMA) out."""
