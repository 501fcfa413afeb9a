"""The sending side of a messenger: connections to other messengers, writes and fetches."""
