"""Gradients that are taken a step later: gradient_delay=1."""
