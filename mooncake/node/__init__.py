"""One machine's processes: the supervisor that starts and restarts them, and their side of that."""
