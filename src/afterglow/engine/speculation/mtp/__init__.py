"""Drafting with a model's own multi-token-prediction heads."""
