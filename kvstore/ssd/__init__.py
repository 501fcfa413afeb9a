"""The SSD tier of a pool: slab files, and the mover between the tiers."""
