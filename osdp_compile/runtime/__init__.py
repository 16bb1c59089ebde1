"""Runtime: what runs on every rank while a model trains."""
