"""Overlap: bucket, split by mesh dimension and order collectives beside compute."""
