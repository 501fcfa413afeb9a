"""Access: the API keys of clients and administrators, and their limits."""
