"""Read, edit, check and print FX graphs."""
