"""Runtime: code that runs on every rank during training."""
