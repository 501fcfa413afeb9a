"""The batch of running sequences: who is in it, with which share, and its iterations."""
