"""Plain values that several engine packages share."""
