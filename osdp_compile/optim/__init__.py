"""Optim: optimizers on laid-out parameters."""
