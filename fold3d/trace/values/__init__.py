"""Running a model on shapes: which operations need no values."""
