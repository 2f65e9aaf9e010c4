"""The `afterglow` command line program: one module per command."""
