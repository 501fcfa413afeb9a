"""The Conductor's view of its instances: loads, costs, transfers, and their predictions."""
