"""Lowering: from a Dynamo graph with markers to compiled forward and backward functions."""
