"""Views of cached state, and operations on it: pins, snapshots, archives, verification."""
