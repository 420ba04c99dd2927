"""Predictions in, numbers out: named protocols, averages with intervals, comparisons and the paper's tables.

Belongs here: everything that turns predictions and labels into numbers. Nothing here runs a model or reads a dataset.
"""
