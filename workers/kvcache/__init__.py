"""KVCache between the device and the pool: copies of single layers, loads, stores, reservations."""
