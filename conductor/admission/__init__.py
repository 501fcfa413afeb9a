"""Early rejection: which requests are refused because an SLO would be missed."""
