"""The cost of every node, and the bytes of the training state."""
