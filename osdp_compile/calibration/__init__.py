"""Calibration: measure this machine and its network, and keep the profile."""
