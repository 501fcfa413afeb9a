"""The Conductor's decisions as people and Prometheus see them."""
