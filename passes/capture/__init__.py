"""Capture: a training step before any decision, whole or with its inner layers folded."""
