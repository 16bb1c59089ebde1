"""Model: a user's modules, before and after in-place sharding of their parameters."""
