"""Optim: optimizers on sharded parameters."""
