"""The user's optimizer, stepped bucket by bucket: knows buckets and torch's optimizers, not when a step is due."""
