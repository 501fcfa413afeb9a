"""The DRAM tier of a pool: pages, who uses them, and which go first when room is short."""
