"""Means to keep the time between tokens within its SLO: predictions, double check, pauses, prompt budgets."""
