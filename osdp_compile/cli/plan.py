"""``osdp plan``: plan a model for a cluster that may be elsewhere; compare with common plans."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from osdp_compile.cli.argument_types import prepare_file
from osdp_compile.cli.model_arguments import exit_status, given_model, working
from osdp_compile.figures import new_figure
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.alternatives import alternatives_for
from osdp_compile.planning.batch_search import Tried, best_batch
from osdp_compile.planning.frontier import Frontier, frontier
from osdp_compile.planning.offline import mesh_sizes
from osdp_compile.planning.planner_inputs import slices_of as slices_by_name
from osdp_compile.planning.planner_inputs import stays_of
from osdp_compile.planning.traced_step import TracedStep
from osdp_compile.reports.page.collect import Sources
from osdp_compile.reports.page.page import check_page, save_page
from osdp_compile.reports.plan_table import plan_text
from passes.types.hardware import Hardware
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_seconds


def run(given: argparse.Namespace) -> int:
    """Plan and print; the exit status."""
    return exit_status("osdp plan", lambda console: _run(given, console))


def _run(given: argparse.Namespace, console: Console) -> None:
    batches, length = given.batch_sizes is not None, given.sequence_length
    checked = given_model(given, batches or given.batch_size is not None, length is not None)
    hardware = checked.hardware
    forced = _forced(given)

    def traced(batch: int | None, length: int | None) -> TracedStep:
        return forced(checked.traced(batch, length))

    if (given.world_size is None) == (given.mesh is None):
        raise ValueError("give --world-size, or --mesh, and not both")
    ranks = mesh_sizes(given.world_size, given.mesh)
    limit_bytes = given.memory_limit
    _check_files(given)
    with working("osdp plan", "tracing") as say:
        if batches:
            tried = best_batch(
                lambda batch: traced(batch, length),
                given.batch_sizes,
                ranks,
                hardware,
                limit_bytes,
                say,
                given.search,
            )
            best = max(tried, key=lambda one: one.samples_per_second)
            assert best.plan is not None
            step, found = best.step, best.plan
        else:
            step = traced(given.batch_size, length)
            say("planning")
            found = step.plan(ranks, hardware, limit_bytes, given.search, say)
    if batches:
        console.print(_batch_table(tried))
    print(plan_text(found), flush=True)
    if hardware.device_type == "cuda":
        console.print(step.operators, markup=False)
    if given.out is not None:
        found.save(given.out)
        console.print(f"Saved. To use it: options={{'plan': '{given.out}'}}", markup=False)
    _compare(given, step, found, ranks, hardware, console)


def _check_files(given: argparse.Namespace) -> None:
    """Report missing packages and unwritable files before planning."""
    if given.frontier is not None:
        new_figure("--frontier", 1, 1)
    if given.html is not None:
        check_page("--html")
    for path in (given.out, given.frontier, given.html):
        if path is not None and (failure := prepare_file(path)):
            raise ValueError(failure)


def _compare(
    given: argparse.Namespace,
    step: TracedStep,
    found: Plan,
    ranks: Mapping[str, int],
    hardware: Hardware,
    console: Console,
) -> None:
    """Compare with common plans and under other limits; write the page."""
    limit_bytes = given.memory_limit
    with working("osdp plan", "pricing the alternatives"):
        ctx = step.context(ranks, hardware, None)
        others = {
            name: step.uniform(decision, ranks, hardware)
            for name, decision in alternatives_for(ctx).items()
        }
    console.print(_comparison(found, others, limit_bytes))
    points: Sequence[tuple[int, Plan]] = ()
    if given.frontier is not None:
        with working("osdp plan --frontier", "planning under other limits") as say:
            curve = frontier(step, ranks, hardware, say, search=given.search)
        console.print(_frontier_table(curve))
        curve.draw(given.frontier, others)
        console.print(f"Drawn in {given.frontier}", markup=False)
        points = curve.points
    if given.html is not None:
        sources = Sources(
            model=given.model or given.hf_config.resolve().name,
            hardware=hardware.name,
            plan=found,
            timeline=step.simulated(found, ranks, hardware),
            limit_bytes=limit_bytes,
            others=others,
            frontier=points,
            operators=step.operators if hardware.device_type == "cuda" else "",
        )
        save_page(sources, given.html, "--html")
        console.print(f"Open {given.html} in a browser", markup=False)


def _forced(given: argparse.Namespace) -> Callable[[TracedStep], TracedStep]:
    """Adds the user's slices and weights that stay to a traced step."""
    stays = given.tensor_parallel
    options = {"slices": given.slices, "tensor_parallel": True if stays == [] else stays}
    checked = CheckedOptions.parse(options)

    def forced(step: TracedStep) -> TracedStep:
        return dataclasses.replace(
            step,
            slices=slices_by_name(checked.slices, step.parameters),
            tensor_parallel=stays_of(checked.tensor_parallel, step.parameters),
        )

    return forced


def _comparison(found: Plan, others: dict[str, Plan], limit_bytes: int | None) -> Table:
    """The plan beside common plans."""
    table = Table(title="compared with one decision for all parameters", title_justify="left")
    table.add_column("plan")
    for head in ("step", "exposed", "peak", "fits", "step / osdp's"):
        table.add_column(head, justify="right")
    ours = found.prediction
    assert ours is not None
    for name, plan in {"osdp": found, **others}.items():
        said = plan.prediction
        assert said is not None
        fits = limit_bytes is None or said.peak_bytes <= limit_bytes
        table.add_row(
            name,
            format_seconds(said.step_seconds),
            format_seconds(said.exposed_seconds),
            format_bytes(said.peak_bytes),
            "yes" if fits else "[red]no[/red]",
            "" if plan is found else f"{said.step_seconds / ours.step_seconds:.2f}",
        )
    return table


def _batch_table(tried: Sequence[Tried]) -> Table:
    table = Table(title="batch sizes of a rank", title_justify="left")
    for head in ("batch", "step", "samples a second, all ranks", "peak"):
        table.add_column(head, justify="right")
    best = max(tried, key=lambda one: one.samples_per_second)
    for one in tried:
        said = None if one.plan is None else one.plan.prediction
        table.add_row(
            str(one.batch),
            "does not fit" if said is None else format_seconds(said.step_seconds),
            "" if said is None else f"{one.samples_per_second:,.1f}",
            format_bytes(one.least_bytes if said is None else said.peak_bytes),
            style="bold" if one is best else None,
        )
    return table


def _frontier_table(curve: Frontier) -> Table:
    table = Table(title="step time against memory", title_justify="left")
    for head in ("limit", "peak", "step", "exposed"):
        table.add_column(head, justify="right")
    for limit_bytes, plan in curve.points:
        said = plan.prediction
        assert said is not None
        table.add_row(
            format_bytes(limit_bytes, round_up=True),
            format_bytes(said.peak_bytes),
            format_seconds(said.step_seconds),
            format_seconds(said.exposed_seconds),
        )
    return table
