"""Measuring what the planner counts with: layers, optimizer, links.

Knows models, and the network by `fold3d.comms`; decides nothing. Used by the planner in `fold3d.engine`.
"""
