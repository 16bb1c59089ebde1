"""A pass of your own: gradients travel in bfloat16, half the bytes on the wire.

torchrun --nproc-per-node 2 examples/custom_pass.py    # graphs/ has the text after each pass
"""

import torch
import torch.distributed as dist
from torch import fx, nn

from passes.context import Context
from passes.graph import WAIT, call, set_value
from passes.pipeline import Pass, default_passes, insert_after
from passes.shard import after_wait


def half_gradients(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Cast what every reduction sends, and cast back what its wait returns."""
    cast = torch.ops.prims.convert_element_type.default
    for wait in gm.graph.find_nodes(op="call_function", target=WAIT):
        (start,) = wait.all_input_nodes
        if start.meta["collective"].gathers or start.meta["val"].dtype != torch.float32:
            continue
        with gm.graph.inserting_before(start):
            start.update_arg(0, call(gm.graph, cast, (start.args[0], torch.bfloat16)))
        set_value(start)
        set_value(wait)
        with gm.graph.inserting_after(wait):
            back = after_wait(call(gm.graph, cast, (wait, torch.float32)))
        wait.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    return gm


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    passes = insert_after(default_passes(), "shard", Pass("half_gradients", half_gradients))
    model = torch.compile(model, backend="osdp", options={"passes": passes, "debug": "graphs"})
    model(torch.randn(8, 512)).square().mean().backward()
    print(f"rank {dist.get_rank()}: {next(model.parameters()).grad.full_tensor().norm():.4f}")
