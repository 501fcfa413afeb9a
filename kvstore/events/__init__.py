"""KV events: the changes of a pool, as messages for its followers."""
