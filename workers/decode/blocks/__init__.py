"""The blocks of sequences that are being decoded, in pages of the device and of all ranks' pools."""
