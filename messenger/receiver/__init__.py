"""The side of a messenger that answers: admission of peers, their writes to this pool and fetches from it."""
