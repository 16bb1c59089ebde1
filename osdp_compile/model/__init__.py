"""Model: a user's modules, before and after their parameters are sharded in place."""
