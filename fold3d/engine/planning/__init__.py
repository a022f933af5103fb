"""What is decided about a run from measured times: before its first step, and from then on."""
