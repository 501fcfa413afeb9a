"""Messages between a messenger and the users of its pool part: a worker, and clients."""
