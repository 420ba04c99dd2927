"""Estimates before a run: memory, time and disk of every stage."""
