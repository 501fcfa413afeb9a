"""The DRAM tier of a pool: pages, their users, and the order of eviction."""
