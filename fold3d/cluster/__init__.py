"""Many jobs on GPUs of several kinds: which runs where and when. Needs no torch."""
