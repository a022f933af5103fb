"""What replicas take the place of processes in: who reads which samples, and whose results are gathered."""
