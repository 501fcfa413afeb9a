"""The side of a messenger that asks: connections to other messengers, writes to them, fetches from them."""
