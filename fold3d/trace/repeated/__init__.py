"""Blocks that repeat: which of them need not run on tensors without values."""
