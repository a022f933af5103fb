"""How the Trainer evaluates, predicts and generates where no rank holds the whole model."""
