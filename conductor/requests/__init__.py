"""Accepted requests: their states, the registry that owns them, and the decisions about them."""
