"""What the Conductor knows and predicts of its instances: load, costs, and what is under way."""
