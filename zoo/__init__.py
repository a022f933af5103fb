"""Every model class of the installed transformers, tiny and random, cut into four parts and compared with itself."""
