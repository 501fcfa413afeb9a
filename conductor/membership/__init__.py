"""Instances that join, change roles and leave, and the effects on their requests."""
