"""Jobs and the decisions about what runs in the next decode."""
