"""Routes of the HTTP API, of the dashboard, and for operators."""
