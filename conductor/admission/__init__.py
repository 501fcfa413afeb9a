"""The decisions which requests are not accepted: early rejection by predicted SLOs, and quotas of tenants."""
