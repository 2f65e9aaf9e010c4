"""The `afterglow` program: one module per command."""
