"""The Conductor's decisions, shown to people and to Prometheus."""
