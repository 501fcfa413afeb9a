"""Early rejection: which requests are rejected because an SLO would be missed."""
