"""The batch of running sequences: the sequences in it, the shares of tenants, its iterations."""
