"""All private names of torch, found before anything needs one: where one is not there, say so."""

from osdp_compile.torch_versions import lacks

try:
    import osdp_compile._torch  # noqa: F401
except (ImportError, AttributeError) as error:
    if isinstance(error, ImportError) and not (error.name or "").startswith("torch."):
        raise
    from torch import __version__

    raise ImportError(lacks(__version__, error)) from None
