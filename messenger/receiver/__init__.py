"""The receiving side of a messenger: admission of peers, writes to this pool, and reads from it."""
