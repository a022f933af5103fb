"""Blocks that repeat: which of them need not run to be counted."""
