"""The choice of the Conductor that leads: the only one, or the one that holds the oldest lease in etcd."""
