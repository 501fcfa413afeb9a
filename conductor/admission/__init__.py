"""Admission: early rejection by predicted SLOs, and the quotas of tenants."""
