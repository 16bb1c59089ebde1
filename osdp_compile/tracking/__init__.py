"""Tracking: models between their calls: sessions, steps, memory, what no graph covers."""
