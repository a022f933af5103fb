"""What a rank got from the others of its tensor-parallel group, kept for code that runs again."""
