"""Object-store tier of the prefix cache: blocks and checkpoints that several machines share."""
