"""The enforcement of TBT SLOs on a decode instance: predictions, double check, pauses, prompt budgets."""
