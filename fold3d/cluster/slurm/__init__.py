"""Rounds on Slurm: an ordinary user's own jobs, started, moved and ended with sbatch and scancel. No daemon."""
