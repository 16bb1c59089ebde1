"""Tracking of models between calls: sessions, step times, memory, uncovered parameters."""
