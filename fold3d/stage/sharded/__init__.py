"""What a chunk does differently whose weights are spread over a tensor-parallel group: micro-batches in two halves, one
of which computes while TP.sync of the other travels; borders that travel in parts."""
