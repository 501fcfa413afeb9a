"""What the front costs, beside bare FastAPI and behind instances that answer at once."""
