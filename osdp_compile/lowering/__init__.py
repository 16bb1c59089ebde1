"""Engine: the backend, from a Dynamo graph to compiled forward and backward functions."""
