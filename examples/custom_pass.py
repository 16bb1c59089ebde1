"""A pass of your own: gradients travel in bfloat16, half the bytes on the wire.

torchrun --nproc-per-node 2 examples/custom_pass.py    # graphs/ has the text after each pass
"""

import torch
import torch.distributed as dist
from torch import fx, nn

from passes.graph.fx_utils import call, set_value
from passes.ops.markers import REDUCE_GRAD
from passes.pipeline import Pass, default_passes, insert_before
from passes.types.context import Context


def half_gradients(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Cast every gradient to bfloat16 before its reduction, and the result back."""
    cast = torch.ops.prims.convert_element_type.default
    for reduced in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        dtype = reduced.meta["val"].dtype
        with gm.graph.inserting_before(reduced):
            reduced.update_arg(0, call(gm.graph, cast, (reduced.args[0], torch.bfloat16)))
        set_value(reduced)
        with gm.graph.inserting_after(reduced):
            back = call(gm.graph, cast, (reduced, dtype))
        reduced.replace_all_uses_with(back, lambda user, back=back: user is not back)
    return gm


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    passes = insert_before(default_passes(), "shard", Pass("half_gradients", half_gradients))
    options = {"passes": passes, "debug": "graphs", "memory_limit": "9MiB"}
    model = torch.compile(model, backend="osdp", options=options)
    model(torch.randn(8, 512)).square().mean().backward()
    print(f"rank {dist.get_rank()}: {next(model.parameters()).grad.full_tensor().norm():.4f}")
    dist.destroy_process_group()
