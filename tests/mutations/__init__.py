"""Faults of one line in csrc and fold3d, and what tells whether a command, such as `make test`, finds them."""
