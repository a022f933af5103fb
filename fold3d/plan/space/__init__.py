"""What can be chosen: one file per subject, and the registry that the search, the command line and the flags walk.

Knows the job and what came before in the registry; not how a value is put into practice. Called by the planner.
"""
