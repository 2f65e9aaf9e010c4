"""Text: what tokens say. Knows no requests and no memory."""
