"""Algorithm 1: which pair of instances serves a request."""
