"""What commands keep in files, for the next time."""
