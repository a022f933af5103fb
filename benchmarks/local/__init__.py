"""Processes of this machine for benchmarks that need nothing but several ranks."""
