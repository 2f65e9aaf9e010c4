"""Response formats, tool choice and reasoning options, as grammars and budgets."""
