"""Rules by which requests and modules move and instances change roles as the load changes. No IO."""
