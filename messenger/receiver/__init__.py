"""The side that answers: who is let in, and what they may write to or read from this pool."""
