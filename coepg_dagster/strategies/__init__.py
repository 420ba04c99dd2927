"""Ideas of other systems as pure functions, which an experiment file names: what to train on, and how to infer.

A function here gets what models say from its caller, and loads none. docs/methods.md has the list.
"""
