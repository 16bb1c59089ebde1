"""Recompute: compute saved activations again in the backward."""
