"""The endpoint picker, which gateways ask for the front of each request: Envoy's external processing, as the
Gateway API inference extension uses it (its proposal 004, version 1.0.0)."""
