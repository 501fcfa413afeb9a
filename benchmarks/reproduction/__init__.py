"""The results that papers published, compared with those of this system in the simulator."""
