"""Early rejection by predicted SLOs, and the quotas of tenants: which requests are not accepted."""
