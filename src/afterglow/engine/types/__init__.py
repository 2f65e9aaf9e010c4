"""Plain values and protocols that several engine packages share."""
