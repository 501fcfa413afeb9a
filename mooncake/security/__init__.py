"""Keys: the cluster's own, which all processes share, and those of clients of the HTTP API."""
