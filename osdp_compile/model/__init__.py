"""Model: a user's modules, their parameters, and what the ranks agree on."""
