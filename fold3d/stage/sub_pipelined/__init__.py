"""Micro-batches in two parts, one of which computes while TP.sync of the other travels."""
