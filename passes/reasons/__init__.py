"""Reasons: what each decision of a plan gains, in words."""
