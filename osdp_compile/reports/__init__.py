"""Reports: plans, predictions and measurements for people."""
