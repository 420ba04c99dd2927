"""`python -m coepg_dagster.cli`."""

from coepg_dagster.cli import app

app()
