"""The ``osdp`` command."""
