"""Reports: tables and plots of plans, predictions and measurements."""
