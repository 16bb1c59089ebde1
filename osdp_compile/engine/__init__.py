"""Engine: the backend, and a model's first call."""
