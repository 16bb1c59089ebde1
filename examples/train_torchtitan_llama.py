"""Train torchtitan's Llama 3 with osdp in the place of its FSDP.

    pip install torchtitan
    torchrun --nproc-per-node 2 examples/train_torchtitan_llama.py --flavor debugmodel

Model, initialisation and loss are torchtitan's. Its ``parallelize_llama`` wraps each block in FSDP
and compiles it. Here the step is compiled whole, in one line that is marked below.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import osdp_compile

try:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
except ImportError:
    sys.exit("this example needs torchtitan: pip install torchtitan")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train torchtitan's Llama 3.")
    parser.add_argument("--flavor", default="debugmodel", choices=list(llama3_configs))
    parser.add_argument("--layers", type=int, help="keep this many (default: all)")
    parser.add_argument("--memory-limit", help="for one rank, such as 200MiB (default: none)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--fsdp", action="store_true", help="torchtitan's FSDP, to compare with")
    return parser.parse_args()


def llama(flavor: str, layers: int | None, length: int) -> nn.Module:
    """A Llama 3 with torchtitan's initial weights."""
    config = llama3_configs[flavor](attn_backend="flex")
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.rope.max_seq_len = length
        # Causal attention that trains on a CPU too.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model


def shard_as_torchtitan_does(model: nn.Module, ranks: int) -> None:
    """Its FSDP2 by block, with gradients that are averaged: its own loop sums them."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(ranks)


def batch(step: int, rank: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Sorted random tokens, which can be learnt, and the next token of each."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 256, (rows, length + 1), generator=generator).sort().values
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:  # torchrun started us
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = llama(args.flavor, args.layers, args.length)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_loss(model(tokens), targets) / targets.numel()

    if args.fsdp:
        shard_as_torchtitan_does(model, ranks)
        step_loss = loss_of
    else:
        options = {"memory_limit": args.memory_limit}
        step_loss = torch.compile(loss_of, backend="osdp", options=options)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(1, args.steps + 1):
        loss = step_loss(*batch(step, rank, args.batch, args.length))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if dist.is_initialized():
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}  loss {mean.item():.6f}", flush=True)

    if rank == 0 and not args.fsdp:
        print(osdp_compile.report(model))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
