"""Where parameters come from and where they go: initial values by name, folders, letting go.

Knows models and recordings; no process group. Used by stage and checkpoint.
"""
