"""What happens once per micro-batch, although code of the user's runs for each of a process's chunks."""
