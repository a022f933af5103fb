"""What fold3d costs, moves and saves, measured: programs to run, and their tests."""
