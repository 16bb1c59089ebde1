"""Overlap: bucket collectives, carry them out hierarchically, and schedule them beside compute."""
