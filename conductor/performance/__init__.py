"""The performance of instances: BanaServe's model of it, and the utilisation that heartbeats tell."""
