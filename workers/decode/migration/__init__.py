"""Migrations of running requests: what their source does, and their destination."""
