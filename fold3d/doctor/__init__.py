"""What was built, what the machines have, whether their ranks reach each other and how fast: `fold3d doctor`."""
