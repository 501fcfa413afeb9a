"""The sending side of a messenger: connections to other messengers, writes to them and fetches from them."""
