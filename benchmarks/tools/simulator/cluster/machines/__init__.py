"""Time, machines and the networks between them: what computing and sending take."""
