"""What people and Prometheus see of the Conductor's decisions."""
