"""Proof that ranks which share a block compute what the block computes."""
