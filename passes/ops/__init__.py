"""Operators of this package: schemas, shapes, derivatives; ``osdp_compile/runtime`` runs them."""
