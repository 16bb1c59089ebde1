"""Passes that move activations to weights that stay where they are."""
