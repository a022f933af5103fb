"""Results of modules: what they are made of, and which tensors of them cross a border."""
