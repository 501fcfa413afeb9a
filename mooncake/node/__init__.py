"""A machine's processes: the supervisor that starts and restarts them, and the start and end of a child."""
