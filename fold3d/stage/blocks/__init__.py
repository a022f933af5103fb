"""What is done to single blocks of a model, besides running them."""
