"""How the ranks that share a model's blocks may share the sequence outside of their regions, too."""
