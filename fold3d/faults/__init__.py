"""How the ranks of a job learn that one of them failed, was interrupted or holds up the others.

Knows the store and where each rank is; no model. Used by everything that waits for another rank.
"""
