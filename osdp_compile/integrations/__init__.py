"""Integrations with Hugging Face and pytest."""
