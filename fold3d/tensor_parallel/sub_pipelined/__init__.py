"""Two forwards of one model that take turns on one thread: one computes while TP.sync of the other travels."""
