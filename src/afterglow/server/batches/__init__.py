"""Files and batches: many requests in one file, run at the lowest priority."""
