"""Images and audio as plain values: loading, decoding and access policy. Does not know models."""
