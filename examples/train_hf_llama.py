"""Train a small Hugging Face Llama, random weights, on the text of Python's standard library.

    pip install -e '.[hf]'
    torchrun --nproc-per-node 2 examples/train_hf_llama.py --memory-limit 60MiB

The model comes from transformers as it is. One line is special, marked below.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from train_gpt import CONTEXT, mean_over_ranks, random_batch, standard_library

import osdp_compile

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs transformers: pip install 'osdp-compile[hf]'")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Hugging Face Llama.")
    parser.add_argument("--memory-limit", help="for one rank, such as 60MiB (default: none)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help=f"rows of {CONTEXT} bytes a rank")
    return parser.parse_args()


def llama(layers: int, width: int) -> LlamaForCausalLM:
    """A Llama of bytes, with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        use_cache=False,  # of keys and values; training has no use for it
    )
    return LlamaForCausalLM(config)


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:  # torchrun started us
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = llama(args.layers, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"memory_limit": args.memory_limit}
    compiled = torch.compile(model, backend="osdp", options=options)  # the one line

    text, _ = standard_library()
    batches = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        tokens, _ = random_batch(text, args.batch, batches)
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss, seconds = mean_over_ranks(loss.item(), time.perf_counter() - began)
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}  loss {loss:.3f}  {seconds:.2f} s", flush=True)

    plan = osdp_compile.plan_of(model)
    if rank == 0 and plan is not None:
        sharded = sum(row.decision.sharded for row in plan.parameters)
        print(f"{sharded} of {len(plan.parameters)} parameters sharded")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
