"""Integrations: Hugging Face and pytest."""
