"""Families of PEFT: adapters on a tiny Llama, whose own weights are frozen.

LoRA, and every 7th of the 45 methods of PEFT 0.21 in the order of ``PeftType``.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.families.transformers_models import VOCABULARY, _own_loss, build
from benchmarks.families.trial import Family, Trial, without_dropout, words

_LINEARS = ["q_proj", "v_proj", "up_proj", "down_proj"]

#: Method, and arguments of its configuration.
METHODS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, "target_modules": _LINEARS},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "BOFT": {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
    "OFT": {"oft_block_size": 8, "target_modules": ["q_proj", "v_proj"]},
    "GLORA": {"r": 4, "target_modules": _LINEARS},
    "RANDLORA": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "OSF": {"target_modules": ["q_proj", "v_proj"]},
    "SHADOW": {},
}


def _trial(method: str, arguments: dict[str, Any]) -> Trial:
    import peft

    kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[method]]
    config = kind(task_type="CAUSAL_LM", **arguments)
    model = peft.get_peft_model(build("llama", "LlamaForCausalLM"), config)
    return Trial(without_dropout(model.train()), words(VOCABULARY, 2, 16), _own_loss)


#: What no plan keeps, by the words of the refusal: OSF projects gradients by hooks of parameters.
_REFUSED = {"OSF": "has a gradient hook"}

FAMILIES = [
    Family(
        f"PEFT {method}",
        "peft",
        functools.partial(_trial, method, arguments),
        refused=_REFUSED.get(method),
    )
    for method, arguments in METHODS.items()
]
