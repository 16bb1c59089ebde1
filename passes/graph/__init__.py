"""Graph: read, edit, check and print FX graphs."""
