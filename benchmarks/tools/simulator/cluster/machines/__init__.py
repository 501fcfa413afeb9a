"""Time, machines and the networks between them: the durations of computing and sending."""
