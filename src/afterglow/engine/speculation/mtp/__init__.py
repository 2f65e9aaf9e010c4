"""Drafting with a model's multi-token-prediction heads."""
