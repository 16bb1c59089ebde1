"""Import check for torch's private names: a missing one gives an error that names it."""

from osdp_compile.torch_versions import lacks

try:
    import osdp_compile._torch  # noqa: F401
except (ImportError, AttributeError) as error:
    if isinstance(error, ImportError) and not (error.name or "").startswith("torch."):
        raise
    from torch import __version__

    raise ImportError(lacks(__version__, error)) from None
