"""Public datasets in, tables of steps out.

Each reader is a function that takes files and yields `Item`s (see `rows`): one labelled step, or a row left out with a
reason. `importing` turns them into Parquet, streaming, with counts, and stops where too much is bad.
"""
