"""The performance of instances: BanaServe's model, and the utilisation that heartbeats report."""
