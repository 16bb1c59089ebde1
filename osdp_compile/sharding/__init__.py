"""Sharding in place: DTensor parameters, and how modules read them."""
