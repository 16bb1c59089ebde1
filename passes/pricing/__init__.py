"""Pricing: what a candidate costs, simulated as it will run and forecast from another one."""
