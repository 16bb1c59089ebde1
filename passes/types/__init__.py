"""Data types that all passes share."""
