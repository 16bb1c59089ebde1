"""The options of ``torch.compile(model, backend="osdp", options={...})``."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, TypeGuard, cast, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile import _torch
from osdp_compile.errors import OptionError
from osdp_compile.model.mixed_precision import Precision
from osdp_compile.optim.state_sizes import known_optimizers
from osdp_compile.runtime.meshes import check_mesh
from passes.pipeline import Pass, validate
from passes.types.hardware import Hardware
from passes.types.hardware_presets import PRESETS, preset
from passes.types.plan import Plan
from passes.types.units import parse_limit

#: The planner's search: one limit, or lower limits too, which takes minutes
#: (``passes/plan/monotone_search.py``).
Search = Literal["quick", "thorough"]

#: Gradients at the start of a backward: none (False), reduced ones of earlier backwards
#: ("reduced"), or whole ones that each rank accumulates (True).
Accumulate = Literal[False, True, "reduced"]


class Described(NamedTuple):
    """An option in words, for error messages and for ``docs/options.md``.

    Attributes:
        values: the allowed values; code stands between backticks.
        default: the meaning of an option that is not given.
        page: the page of ``docs/`` about it, with an anchor; "": there is none.
    """

    values: str
    default: str
    page: str = ""


#: Every option. ``python -m tools.options_page`` writes the table of ``docs/options.md`` from it.
DESCRIBED: dict[str, Described] = {
    "memory_limit": Described(
        "bytes that one rank may hold in a training step: a whole number, or text such as "
        "`'8GiB'` or `'500MB'`",
        "the limit of the option `plan`; else no limit: the fastest plan",
    ),
    "mesh": Described(
        "a `DeviceMesh` over the data-parallel ranks, with one dimension, such as `mesh['dp']`, or "
        "with two: hosts, and the ranks of each",
        "all ranks, one dimension",
        "hosts.md",
    ),
    "optimizer": Described(
        "the optimizer state of a parameter: a name, such as `'adamw'` or `'sgd_momentum'`, or "
        "bytes for each element",
        "read from the optimizer that holds the parameters; AdamW if none does",
    ),
    "plan": Described(
        "an `osdp_compile.Plan`, or the path of a saved one",
        "searched for",
        "reading_a_plan.md",
    ),
    "hardware": Described(
        "an `osdp_compile.Hardware`, the path of a saved one, or the name of a preset: "
        + ", ".join(f"`{name}`" for name in PRESETS),
        "measured at the first call, and kept",
        "hardware_profiles.md",
    ),
    "slices": Described(
        "`1`: every operator runs whole; or numbers of slices by parameter, such as "
        "`{'blocks.*.up.weight': 4}`, with `(4, 1)` to keep one of four slices gathered for the "
        "backward and regather the others",
        "the planner's choice",
        "reading_a_plan.md#slices",
    ),
    "tensor_parallel": Described(
        "`True`: the planner may leave the weights of an MLP, attention, an embedding, a head "
        "or stacked experts where they are, and move activations; "
        "or a list of names of such parameters, such as `['blocks.*.up.weight']`",
        "`False`: all weights move",
        "moving_activations.md",
    ),
    "search": Described(
        "`'quick'`; or `'thorough'` to search under lower limits too, so that more memory never "
        "gives a slower step: minutes in place of seconds",
        "`'quick'`",
        "reading_a_plan.md#quick-and-thorough-search",
    ),
    "param_dtype": Described(
        "a `torch.dtype` or its name, such as `'bfloat16'`: parameters are gathered and computed "
        "with in it, and keep their own in the optimizer",
        "their own",
        "mixed_precision.md",
    ),
    "reduce_dtype": Described(
        "a `torch.dtype` or its name, in which gradients travel",
        "the one they are computed in",
        "mixed_precision.md",
    ),
    "accumulate": Described(
        "`'reduced'` to plan with room for the gradients of earlier backwards; `True` for whole "
        "gradients, for `osdp_compile.no_sync`",
        "`False`",
        "gradient_accumulation.md",
    ),
    "inductor": Described(
        "settings of Inductor for the lowered graphs, such as `{'max_autotune': True}`, or the "
        "name of a mode of `torch.compile`, such as `'max-autotune-no-cudagraphs'`",
        "Inductor's own",
        "options.md#settings-of-inductor",
    ),
    "debug": Described(
        "`True` to check the graph after every pass; a folder to also write every graph there as "
        "text",
        "the variable `OSDP_DEBUG` (`1` or a folder), else `False`",
        "write_a_pass.md#rules-for-a-pass",
    ),
    "passes": Described(
        "a list of `passes.pipeline.Pass`",
        "`passes.pipeline.default_passes()`",
        "write_a_pass.md",
    ),
}


class Options(TypedDict, total=False):
    """The options, for editors and type checkers: a ``dict`` with these keys.

    Example:

        options = Options(memory_limit="8GiB", param_dtype=torch.bfloat16)
        model = torch.compile(model, backend="osdp", options=options)

    ``docs/options.md`` has the values and the default of each.
    """

    memory_limit: int | str | None
    mesh: DeviceMesh | None
    optimizer: int | str | None
    plan: Plan | str | Path | None
    hardware: Hardware | str | Path | None
    slices: Literal[1] | Mapping[str, int | tuple[int, int]] | None
    tensor_parallel: bool | Sequence[str] | None
    search: Search | None
    param_dtype: torch.dtype | str | None
    reduce_dtype: torch.dtype | str | None
    accumulate: Accumulate | None
    inductor: Mapping[str, Any] | str | None
    debug: bool | str | Path | None
    passes: Sequence[Pass] | None


@dataclasses.dataclass(frozen=True)
class CheckedOptions:
    """Checked options; None: not given.

    ``memory_limit_bytes``: of one rank, for all memory of a training step.
    ``slices``: by patterns of parameter names; empty: no operator runs in slices.
    ``tensor_parallel``: whether activations may move; or patterns of names of weights that stay.
    ``optimizer``: an int is bytes of state per element of a parameter.
    """

    memory_limit_bytes: int | None = None
    mesh: DeviceMesh | None = None
    optimizer: int | str | None = None
    plan: Plan | None = None
    hardware: Hardware | None = None
    slices: Mapping[str, int | tuple[int, int]] | None = None
    tensor_parallel: bool | tuple[str, ...] = False
    search: Search = "quick"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate: Accumulate = False
    inductor: Mapping[str, Any] | None = None
    debug: Path | bool = False
    passes: tuple[Pass, ...] | None = None

    @property
    def precision(self) -> Precision:
        """``param_dtype`` and ``reduce_dtype``."""
        return Precision(self.param_dtype, self.reduce_dtype)

    def lines(self) -> list[str]:
        """The options that must be equal on every rank, one per line.

        Without ``hardware`` (rank 0's counts) and ``debug`` (each rank's own).
        """
        plan = None
        if self.plan is not None:
            text = json.dumps(self.plan.to_dict(), sort_keys=True)
            plan = f"one with the checksum {hashlib.sha256(text.encode()).hexdigest()[:8]}"
        said = {
            "memory_limit": self.memory_limit_bytes,
            "mesh": None if self.mesh is None else (self.mesh.mesh_dim_names, self.mesh.shape),
            "optimizer": self.optimizer,
            "plan": plan,
            "slices": None if self.slices is None else sorted(self.slices.items()),
            "tensor_parallel": self.tensor_parallel,
            "search": self.search,
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "accumulate": self.accumulate,
            "inductor": None if self.inductor is None else sorted(self.inductor.items()),
            "passes": None if self.passes is None else [one.name for one in self.passes],
        }
        return [f"option {name}: {value}" for name, value in said.items()]

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CheckedOptions:
        """Check the user's options.

        Raises:
            ValueError: for an unknown option or a malformed value; lists the allowed ones.
        """
        given = dict(options or {})
        for name in given:
            if name not in DESCRIBED:
                raise _unknown(name)
        values: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            field = "memory_limit_bytes" if name == "memory_limit" else name
            try:
                values[field] = _READERS[name](value)
            except (ValueError, TypeError, OSError) as error:
                said = f"{error.strerror}: {error.filename!r}" if _is_about_a_file(error) else error
                stop = "" if str(said).endswith(("?", ".")) else "."
                raise OptionError(
                    f"option {name!r}: {said}{stop} Allowed: {_allowed(name)}", name, str(said)
                ) from error
        if "plan" in values and "slices" in values:
            raise ValueError(
                "option 'slices': the plan in option 'plan' says what runs in slices; give one of "
                "the two (Plan.split puts slices into a plan)"
            )
        if "plan" in values and values.get("tensor_parallel"):
            raise ValueError(
                "option 'tensor_parallel': the plan in option 'plan' says which weights stay; give "
                "one of the two (Plan.tensor_parallel puts weights that stay into a plan)"
            )
        if "plan" in values and values.get("search") == "thorough":
            raise ValueError(
                "option 'search': the plan in option 'plan' is taken as it is, none is searched "
                "for; give one of the two"
            )
        values.setdefault("debug", _debug_everywhere())
        read = cls(**values)
        return read if read.plan is None else read.with_plan(read.plan)

    def with_plan(self, plan: Plan) -> CheckedOptions:
        """These options with a plan; without a memory limit they take the plan's."""
        limit_bytes = self.memory_limit_bytes
        if limit_bytes is None:
            limit_bytes = plan.memory_limit_bytes
        return dataclasses.replace(self, plan=plan, memory_limit_bytes=limit_bytes)


def with_mode(options: Mapping[str, Any] | None, mode: str | None) -> dict[str, Any]:
    """The user's options with a mode of ``torch.compile``, as the option ``inductor``.

    Raises:
        ValueError: for an unknown mode, and for one that changes what the plan counts on.
    """
    given = dict(options or {})
    if mode in (None, "default"):
        return given
    try:
        _inductor(mode)
    except ValueError as error:
        raise ValueError(
            f"mode={mode!r}: {error}. backend='osdp' takes mode='default' and "
            "mode='max-autotune-no-cudagraphs'. With other options, give the mode as one: "
            "options={'inductor': 'max-autotune-no-cudagraphs', 'memory_limit': '8GiB'}"
        ) from None
    return {"inductor": mode, **given}


def _is_about_a_file(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.filename is not None


def _debug_everywhere() -> bool | Path:
    """The value of the environment variable OSDP_DEBUG: a switch (0, 1) or a folder."""
    asked = os.environ.get("OSDP_DEBUG", "0")
    return asked == "1" if asked in ("", "0", "1") else Path(asked)


def _allowed(name: str) -> str:
    """The allowed values of an option and its default, as plain text."""
    values, default, _ = DESCRIBED[name]
    return f"{values} (default: {default})".replace("`", "")


def _unknown(name: str) -> ValueError:
    guess = _closest(str(name), DESCRIBED)
    allowed = "; ".join(f"{key!r}: {_allowed(key)}" for key in DESCRIBED)
    return ValueError(f"unknown option {name!r} for backend='osdp'.{guess} Allowed: {allowed}")


def _closest(given: str, known: Iterable[str]) -> str:
    """A guess at a misspelled name, as a sentence after a space; "" without a close name."""
    names = sorted(known)
    close = [one for one in names if one.startswith(given.lower())]
    close = close or difflib.get_close_matches(given.lower(), names, n=1)
    return f" Did you mean {' or '.join(map(repr, close))}?" if given and close else ""


def _mesh(value: Any) -> DeviceMesh:
    if not isinstance(value, DeviceMesh):
        raise ValueError(f"{value!r} is not a DeviceMesh")
    check_mesh(value)
    return value


def _optimizer(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is neither a number of bytes nor a name")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} bytes is below zero")
        return value
    name = value.lower()
    if name not in known_optimizers():
        raise ValueError(f"optimizer {value!r} is not one of {', '.join(known_optimizers())}")
    return name


def _plan(value: Any) -> Plan:
    if isinstance(value, Plan):
        return value
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is neither a Plan nor a path")
    return Plan.load(value)


def _profile(value: Any) -> Hardware:
    if isinstance(value, Hardware):
        return value
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is neither a Hardware nor a path")
    if value in PRESETS:  # "./name" means a file of the same name
        return preset(str(value))
    path = Path(value)
    if len(path.parts) == 1 and not path.suffix and not path.exists():
        raise ValueError(f"{value!r} is neither a preset nor a file.{_closest(path.name, PRESETS)}")
    return Hardware.load(value)


def _slices(value: Any) -> Mapping[str, int | tuple[int, int]]:
    if value == 1 and not isinstance(value, bool):
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is neither 1 nor a mapping of names to numbers")
    found: dict[str, int | tuple[int, int]] = {}
    for name, given in value.items():
        slices, kept = given if isinstance(given, tuple | list) and len(given) == 2 else (given, 0)
        whole = all(type(one) is int for one in (slices, kept))
        if not (isinstance(name, str) and whole and slices >= 1):
            raise ValueError(f"{name!r}: {given!r} is not a number of slices")
        if not 0 <= kept < slices:
            raise ValueError(f"{name!r}: {given!r} keeps {kept} of {slices} slices")
        found[name] = (slices, kept) if kept else slices
    return found


def _tensor_parallel(value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{value!r} is neither True, False nor a list of names")
    return tuple(value)


def _search(value: Any) -> Search:
    if value not in get_args(Search):
        raise ValueError(f"{value!r} is neither {' nor '.join(map(repr, get_args(Search)))}")
    return cast(Search, value)


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{value!r} is not a floating-point dtype")
    return found


def _accumulate(value: Any) -> Accumulate:
    if not isinstance(value, bool) and value != "reduced":
        raise ValueError(f"{value!r} is neither 'reduced', True nor False")
    return cast(Accumulate, value)


def _inductor(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        modes = _torch.inductor.modes()
        if value not in modes:
            raise ValueError(f"{value!r} is no mode of torch.compile.{_closest(value, modes)}")
        value = modes[value]
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is neither a mapping of settings nor the name of a mode")
    known = _torch.inductor.settings()
    found: dict[str, Any] = {}
    for given, setting in value.items():
        name = str(given).replace("-", "_")
        if name not in known:
            raise ValueError(f"Inductor has no setting {given!r}.{_closest(name, known)}")
        if isinstance(known[name], bool | int) and type(setting) is not type(known[name]):
            raise ValueError(f"{given!r} is {type(known[name]).__name__}, not {setting!r}")
        why = _why_refused(name, setting)
        if why:
            raise ValueError(f"{given!r}: {setting!r} is refused: {why}")
        found[name] = setting
    return found


_MEMORY = "it changes the memory that the plan counts"
_OURS = "the plan is carried out by it"
#: Settings of Inductor -> why the value that is not allowed is refused, beside those that change
#: the order (``_torch.inductor.KEEP_ORDER``).
_REFUSED: dict[str, tuple[Any, str]] = {
    "triton.cudagraphs": (False, "CUDA graphs hold memory of their own, which no plan counts"),
    "memory_planning": (False, _MEMORY),
    "inplace_buffers": (True, _MEMORY),
    "combo_kernels": (False, _MEMORY),
    "fallback_by_default": (False, _MEMORY),
    "custom_partitioner_fn": (None, _OURS),
    "_post_fusion_custom_pass": (None, _OURS),
}


def _why_refused(name: str, setting: Any) -> str:
    """Why a setting of Inductor is refused; "": it is allowed."""
    if name in _torch.inductor.KEEP_ORDER and setting != _torch.inductor.KEEP_ORDER[name]:
        return "it would undo the plan's schedule"
    allowed, why = _REFUSED.get(name, (setting, ""))
    return why if setting != allowed else ""


def _debug(value: Any) -> Path | bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is neither True, False nor a folder")
    return Path(value)


def _passes(value: Any) -> tuple[Pass, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, Pass) for one in value):
        raise ValueError("not a list of passes.pipeline.Pass")
    validate(value)
    return tuple(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "memory_limit": parse_limit,
    "mesh": _mesh,
    "optimizer": _optimizer,
    "plan": _plan,
    "hardware": _profile,
    "slices": _slices,
    "tensor_parallel": _tensor_parallel,
    "search": _search,
    "param_dtype": _dtype,
    "reduce_dtype": _dtype,
    "accumulate": _accumulate,
    "inductor": _inductor,
    "debug": _debug,
    "passes": _passes,
}
