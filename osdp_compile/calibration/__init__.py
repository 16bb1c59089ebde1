"""Calibration: measure this machine and its network, and cache the profile."""
