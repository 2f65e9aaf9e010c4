"""Jobs, admission checks, and the choice of what the next decode computes."""
