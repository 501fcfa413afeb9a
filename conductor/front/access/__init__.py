"""Access: the API keys of clients, their limits, and who may look after the cluster."""
