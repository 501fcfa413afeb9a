"""Rules that follow the load, without IO: which requests and modules move, which roles instances have."""
