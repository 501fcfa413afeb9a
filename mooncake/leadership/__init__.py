"""The choice of the Conductor that leads: the only one, or the one that has the oldest key in etcd."""
