"""A benchmark of the front: its costs and those of bare FastAPI, with instances that answer at once."""
