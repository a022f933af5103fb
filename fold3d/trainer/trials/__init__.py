"""Trainings that are tried several times: with other hyperparameters, with smaller batches."""
