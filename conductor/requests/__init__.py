"""Accepted requests: their states, their owner, the decisions about them."""
