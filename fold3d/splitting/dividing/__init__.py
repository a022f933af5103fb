"""What of a block is divided together, and how."""
