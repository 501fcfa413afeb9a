"""The side that asks: connections to other messengers, and what is written to or fetched from them."""
