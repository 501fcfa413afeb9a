"""KV events: the changes of a pool in the form for its followers."""
