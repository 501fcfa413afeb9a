"""Which Conductor leads: always the one there is, or the one that etcd's lease makes leader."""
