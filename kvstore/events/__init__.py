"""KV events: what a pool tells those who mirror it."""
