"""The process of a front, and the start of a front inside the Conductor's process."""
