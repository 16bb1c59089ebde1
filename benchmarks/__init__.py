"""Benchmarks: osdp beside the other ways to train, on hosts with a slow network between them."""
