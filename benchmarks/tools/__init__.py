"""Tools that are installed beside the server: `mooncake-bench`, `mooncake-sim`, `mooncake-plan`, loads."""
