"""Passes that recompute activations in the backward."""
