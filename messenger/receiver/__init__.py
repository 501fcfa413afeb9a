"""The receiving side of a messenger: admission of peers, their writes to this pool and their reads from
it."""
