"""Types: the data that passes share."""
