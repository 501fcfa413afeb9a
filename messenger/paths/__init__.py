"""The choice among several connections and paths: load, speed, health."""
