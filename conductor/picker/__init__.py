"""The endpoint picker. It chooses a front for each request of a gateway.

The picker speaks Envoy's external processing, as the Gateway API inference extension uses it (proposal 004,
version 1.0.0).
"""
