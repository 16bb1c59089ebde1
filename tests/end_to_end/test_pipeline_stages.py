"""Pipeline stages: osdp over ``mesh["dp"]``, ``torch.distributed.pipelining`` beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import osdp_compile
from osdp_compile import OsdpError, Plan
from osdp_compile.planning.planner_inputs import UNSEEN_BYTES
from osdp_compile.trace import fake_world
from tests.boxed import without_inductor
from tests.chosen import more, thorough
from tests.end_to_end.test_limit_is_kept import warnings_of
from tests.searching import short_searches
from tests.training import SLOW, whole

WIDTH, WORDS, MICRO_BATCHES, ROWS = 8, 12, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def made():
    """The whole model, a sequence of four layers."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(*layers).double()


def stage_of(model, index):
    """The first or the second half of the model."""
    return model[2 * index : 2 * index + 2]


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits, targets)


def batch_of(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randint(0, WORDS, (2, ROWS), generator=generator).unbind()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclasses.dataclass
class Pipeline:
    """One rank's stage. ``place``: of this rank along ``dp``; ``index``: of its stage."""

    stage: nn.Module
    schedule: object
    place: int
    index: int

    def step(self, batch):
        """Forwards and backwards of all microbatches; the mean loss, on the last stage."""
        words, targets = batch
        losses = []
        given = (words,) if self.index == 0 else ()
        last = {} if self.index == 0 else {"target": targets, "losses": losses}
        self.schedule.step(*given, **last)
        return sum(one.item() for one in losses) / len(losses) if losses else None


def pipeline(schedule, options_of, wrap=lambda stage, options: None):
    """``options_of``: called with the stage and the mesh. ``wrap``: compiles parts of the stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    index = mesh["pp"].get_local_rank()
    stage = stage_of(made(), index)
    options = {"mesh": mesh["dp"], "hardware": SLOW, **options_of(stage)}
    called = wrap(stage, options) or torch.compile(stage, backend="osdp", options=options)
    parts = PipelineStage(called, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    made_schedule = schedule(parts, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    return Pipeline(stage, made_schedule, mesh["dp"].get_local_rank(), index)


def reference_step(model, optimizer, step):
    total = 0.0
    for place in range(2):
        words, targets = batch_of(step, place)
        loss = loss_of(model(words), targets) / 2
        loss.backward()
        if place == 0:
            total = 2 * loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(rank, world_size, schedule, kind):
    def options_of(stage):
        return {"plan": Plan.uniform(list(stage.named_parameters()), kind, world_size=2)}

    ours, reference = pipeline(schedule, options_of), made()
    optimizers = adamw(ours.stage), adamw(reference)
    apart = []
    for step in range(3):
        loss = ours.step(batch_of(step, ours.place))
        optimizers[0].step()
        optimizers[0].zero_grad()
        wanted = reference_step(reference, optimizers[1], step)
        if loss is not None and ours.place == 0:
            apart.append(abs(loss - wanted))
    pairs = zip(ours.stage.parameters(), stage_of(reference, ours.index).parameters(), strict=True)
    apart += [(whole(one) - other).abs().max().item() for one, other in pairs]
    return max(apart)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (Schedule1F1B, "shard_regather"),
        *thorough((ScheduleGPipe, "shard_keep")),
        *more((ScheduleGPipe, "replicate"), (Schedule1F1B, "shard_keep")),
    ],
)
def test_stages_train_like_one_process(four_ranks, schedule, kind):
    assert max(four_ranks.run(train, schedule, kind)) < 1e-11


def accumulated(rank, world_size, scale_grads):
    """Gradients inside ``no_sync`` against one process; or the error."""

    def options_of(stage):
        return {"plan": Plan.uniform(list(stage.named_parameters()), "shard_keep", world_size=2)}

    def schedule(stage, **given):
        return ScheduleGPipe(stage, scale_grads=scale_grads, **given)

    ours, reference = pipeline(schedule, options_of), made()
    try:
        with osdp_compile.no_sync(ours.stage):
            ours.step(batch_of(0, ours.place))
    except OsdpError as error:
        return str(error)
    for place in range(2):
        words, targets = batch_of(0, place)
        loss = loss_of(reference(words), targets) / 2
        (loss * MICRO_BATCHES).backward()  # the schedule adds up the losses of microbatches
    pairs = zip(ours.stage.parameters(), stage_of(reference, ours.index).parameters(), strict=True)
    return max((whole(one.grad) - other.grad).abs().max().item() for one, other in pairs)


@pytest.mark.thorough
def test_no_sync_around_a_schedule_reduces_once(four_ranks):
    assert max(four_ranks.run(accumulated, False)) < 1e-11


def without_inference(compiled, mesh, given, returned):
    """The first stage, which asks no other rank for shapes."""
    return PipelineStage(
        compiled,
        0,
        2,
        torch.device("cpu"),
        input_args=(given,),
        output_args=(returned.requires_grad_(),),
        group=mesh["pp"].get_group(),
    )


@contextlib.contextmanager
def first_stage(**options):
    """The schedule of the first of two stages, on the first of four ranks that are not there."""
    torch.compiler.reset()
    with fake_world(4), without_inductor():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        stage = stage_of(made(), 0)
        given = {"hardware": SLOW, **({"mesh": mesh["dp"]} | options)}
        compiled = torch.compile(stage, backend="osdp", options=given)
        words = torch.zeros(ROWS // MICRO_BATCHES, dtype=torch.int64)
        part = without_inference(compiled, mesh, words, torch.zeros(len(words), WIDTH).double())
        yield stage, ScheduleGPipe(part, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)


def error_of(call):
    """Our error, which a schedule's stage wraps once it is past its inference of shapes."""
    with pytest.raises(Exception) as found:
        call()
    error = found.value if isinstance(found.value, OsdpError) else found.value.__cause__
    assert isinstance(error, OsdpError)
    return error


def test_a_mesh_with_ranks_of_several_stages_is_refused():
    with first_stage(mesh=None) as (_, schedule):
        error = error_of(lambda: schedule.step(batch_of(0, 0)[0]))
    assert "ranks [0, 1] of several stages: give the ranks" in str(error)


def test_no_sync_around_a_schedule_that_scales_is_refused():
    def step():
        with osdp_compile.no_sync(stage):
            schedule.step(batch_of(0, 0)[0])

    with first_stage() as (stage, schedule):
        assert "scale_grads=False" in str(error_of(step))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def wide():
    torch.manual_seed(0)
    return nn.Sequential(Wide(), Wide())


def square(x, _):
    return x.square().mean()


def under_a_limit(rank, world_size, schedule, limit_bytes):
    """The first stage keeps the limit; the second one has none. What was measured in the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    index = mesh["pp"].get_local_rank()
    options = {"hardware": SLOW, "mesh": mesh["dp"]}
    if index == 0:
        options["memory_limit"] = limit_bytes
    gc.collect()
    with warnings_of() as found, osdp_compile.PeakMemory() as memory:
        rows = torch.randn(512, 64, generator=torch.Generator().manual_seed(rank // 2))
        stage = wide()
        optimizer = torch.optim.AdamW(stage.parameters())
        compiled = torch.compile(stage, backend="osdp", options=options)
        group = mesh["pp"].get_group()
        part = PipelineStage(compiled, index, 2, torch.device("cpu"), group=group)
        parts = schedule(part, n_microbatches=MICRO_BATCHES, loss_fn=square)
        for _ in range(3):
            given, last = ((rows,), {}) if index == 0 else ((), {"target": rows})
            parts.step(*given, **last, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
    peak_bytes = osdp_compile.plan_of(stage).prediction.peak_bytes
    return None if index else (memory.peak_bytes, peak_bytes, found)


@functools.cache
def least_bytes(schedule):
    """The least limit of the first stage."""
    torch.compiler.reset()
    with fake_world(4), without_inductor(), short_searches():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        options = {"hardware": SLOW, "mesh": mesh["dp"], "memory_limit": 1 << 18}
        stage = wide()
        optimizer = torch.optim.AdamW(stage.parameters())
        compiled = torch.compile(stage, backend="osdp", options=options)
        rows = torch.zeros(512 // MICRO_BATCHES, 64)
        part = without_inference(compiled, mesh, rows, torch.zeros_like(rows))
        parts = schedule(part, n_microbatches=MICRO_BATCHES, loss_fn=square)
        error = error_of(lambda: parts.step(torch.randn(512, 64)))
        del optimizer
    assert isinstance(error, osdp_compile.InfeasibleLimit)
    return error.least_bytes


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [Schedule1F1B, *more(ScheduleGPipe)])
def test_a_stage_keeps_its_limit_with_microbatches_in_flight(four_ranks, schedule):
    limit_bytes = least_bytes(schedule) * 11 // 10
    for found in four_ranks.run(under_a_limit, schedule, limit_bytes):
        if found is not None:
            peak_bytes, predicted_bytes, warnings = found
            assert peak_bytes <= limit_bytes
            # With GPipe no gradients of earlier microbatches are there while all are in flight.
            assert predicted_bytes - UNSEEN_BYTES <= 1.15 * peak_bytes
            assert not warnings


@pytest.mark.thorough
def test_more_microbatches_in_flight_need_more_memory():
    """A stage before the last but one of two holds two with ``Schedule1F1B``."""
    assert least_bytes(ScheduleGPipe) > least_bytes(Schedule1F1B)
