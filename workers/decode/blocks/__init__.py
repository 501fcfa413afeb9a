"""The blocks of sequences that are decoded: in pages of the device and of all ranks' pools."""
