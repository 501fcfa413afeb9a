"""Which requests move, and which roles instances have: rules that follow the load, and decide without IO."""
