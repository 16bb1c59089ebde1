"""Private torch, one subject a file; ``osdp_compile/_torch.py`` has all names."""
