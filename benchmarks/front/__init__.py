"""A benchmark of the front: its costs beside bare FastAPI's, with instances that answer at once."""
