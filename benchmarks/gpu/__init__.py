"""What a machine with GPUs measures: fold3d beside what torch has."""
