"""The membership of instances: joining, changes of role, leaving, and the effects on their requests."""
