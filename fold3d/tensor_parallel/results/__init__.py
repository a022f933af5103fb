"""What a model returns of what its ranks have computed in parts."""
