"""The name of the backend's log, for ``TORCH_LOGS="osdp"`` and ``TORCH_LOGS="+osdp"``.

torch reads ``TORCH_LOGS`` while it is imported, before it knows this backend. It accepts its own
names, and names of modules that it can find. This package is here to be found. Nothing imports it.
``osdp_compile/log_lines.py`` attaches the package's log to the logger of this name.
"""
