"""The simulated cluster: its events, the costs of its instances, pools and links."""
