"""The process of a front, and its start inside the Conductor's own."""
