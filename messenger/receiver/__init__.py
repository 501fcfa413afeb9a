"""Side of a messenger that answers: which peers are admitted, and what they may write to or read from this
pool."""
