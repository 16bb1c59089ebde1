"""Custom operators: schemas, shapes, derivatives. ``osdp_compile/runtime`` communicates."""
