"""Instances that come, change their role, and go, and what that does to their requests."""
