"""One machine's processes: the supervisor that starts and restarts them, and the children's side of it."""
