"""Passes that lower the markers of parameters to collectives."""
