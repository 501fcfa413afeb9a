"""Choice among several connections and paths: their load, their speed, their health."""
