"""Read-only views of cached state, and its maintenance: pins, snapshots, archives, verification."""
