"""Shard: from marked parameters to collectives."""
