"""The routes of the HTTP API, of the dashboard, and of those who look after the cluster."""
