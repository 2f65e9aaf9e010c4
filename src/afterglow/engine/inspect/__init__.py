"""Read-only views and maintenance of cached state."""
