"""Chat templates: sandboxed rendering and what a template supports."""
