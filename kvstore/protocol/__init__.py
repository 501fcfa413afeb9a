"""Messages between a messenger and the users of its pool part (a worker, clients), over a Unix socket or
TCP."""
