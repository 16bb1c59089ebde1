"""A pass that runs products of weights that stay in chunks of tokens or sequences."""
