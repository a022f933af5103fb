"""Graph partitioning: which modules of any model may be the blocks between which it is cut."""
