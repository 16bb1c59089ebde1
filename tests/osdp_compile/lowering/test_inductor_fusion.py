"""What Inductor fuses, and where the kernels are then."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from osdp_compile._torch.inductor import KEEP_ORDER
from osdp_compile.lowering.inductor_fusion import in_place

pytestmark = pytest.mark.inductor


def read_and_kept(x, one, other):
    """A result that a product reads, and that a later one reads besides."""
    early = x.sin()
    first = early @ one
    late = early * (other @ other)
    return first, late


def read_once(x, one, other):
    """A result that nothing reads but what is late: it may as well be computed there."""
    return x.sin() * (other @ other), one


def summed_early_and_late(x, one, other):
    """Two sums that read one tensor, and an operator that the late sum does not need."""
    early = x.sum(0)
    between = torch.addmm(one, x, one)
    late = (x * (other @ other)).sum(0)
    return early, between, late


def summed_for_a_late_result(x, one, other):
    """A sum that one late result reads, and an operator that this result does not need."""
    early = x.sum(1, keepdim=True)
    between = torch.addmm(one, x, one)
    return between, early * (other @ other)


def read_by_a_late_product(x, one, other):
    """A result that only the second product reads."""
    result = x.sin() * one
    between = torch.addmm(one, x, other)
    return between, result @ other


def frees_what_it_reads(x, one, other):
    """A small result that only a late result reads. It is all that reads two products."""
    early = ((x @ one) * (one @ x)).sum(1, keepdim=True)
    between = torch.addmm(one, x, other)
    return between, early * (other @ other)


def product_and_late_sum(x, one, other):
    """A product that is the last to read two results, and a late sum."""
    early = x.sin() @ one.cos()
    between = other @ other
    return early + between.sin()


def product_of_what_is_kept(x, one, other):
    """The same of tensors that are read later, so that it frees nothing."""
    wide, tall = x.sin(), one.cos()
    early = wide @ tall
    between = other @ other
    return early + between.sin(), wide.sum(), tall.sum()


def added_to_late_zeros(x, one, other):
    """A result that a product reads, and that is added to zeros behind the product."""
    early = x.sum(1, keepdim=True) * x
    between = torch.addmm(one, early, one)
    place = other[0].abs().long() + torch.arange(64)
    return between, torch.zeros(64, 64).index_put((place,), early, accumulate=True)


def read_with_a_sum_of_inputs(x, one, other):
    """A result that a product reads, and that a later one reads with a sum of inputs alone."""
    early = x.sin()
    between = torch.addmm(one, early, one)
    return between, early * other.cos().sum(1, keepdim=True)


def called(function) -> list[str]:
    """The products and the kernels of a function, in the order in which they are called."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(64, 64) / 8 for _ in range(3)]
    wanted = function(*inputs)
    # The backend's settings, without Inductor's cache: its key knows of neither way.
    with config.patch(KEEP_ORDER), config.patch(fx_graph_cache=False):
        given, (code,) = run_and_get_code(torch.compile(function), *inputs)
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)
    return re.findall(r"^\s+(?:extern_kernels\.)?(addmm|mm|cpp_fused)\w*\(", code, re.MULTILINE)


def test_a_result_is_not_put_off_behind_an_operator_that_it_does_not_need():
    with in_place():
        assert called(read_and_kept) == ["cpp_fused", "mm", "mm", "cpp_fused"]


def test_inductor_by_itself_does_put_it_off():
    assert called(read_and_kept) == ["mm", "cpp_fused", "mm"]


def test_what_only_the_later_one_reads_is_fused():
    with in_place():
        assert called(read_once) == ["mm", "cpp_fused"]


def test_results_that_read_one_tensor_do_not_wait_for_each_others_operators():
    with in_place():
        assert called(summed_early_and_late) == ["cpp_fused", "addmm", "mm", "cpp_fused"]


def test_inductor_by_itself_fuses_them():
    assert called(summed_early_and_late) == ["mm", "cpp_fused", "addmm"]


def test_an_operator_is_not_put_off_behind_all_that_a_late_result_needs():
    with in_place():
        assert called(summed_for_a_late_result) == ["addmm", "mm", "cpp_fused"]


def test_inductor_by_itself_puts_the_operator_off():
    assert called(summed_for_a_late_result) == ["mm", "cpp_fused", "addmm"]


def test_what_frees_more_than_it_writes_is_not_put_off():
    with in_place():
        order = called(frees_what_it_reads)
    assert order == ["mm", "mm", "cpp_fused", "addmm", "mm", "cpp_fused"]


def test_inductor_by_itself_puts_off_what_frees_more():
    assert called(frees_what_it_reads) == ["mm", "mm", "mm", "cpp_fused", "addmm"]


def test_a_result_is_computed_where_the_schedule_has_it():
    with in_place():
        assert called(read_by_a_late_product) == ["cpp_fused", "addmm", "mm"]


def test_inductor_by_itself_computes_it_directly_before_its_reader():
    assert called(read_by_a_late_product) == ["addmm", "cpp_fused", "mm"]


def test_a_result_is_not_put_off_until_zeros_are_filled():
    with in_place():
        assert called(added_to_late_zeros) == ["cpp_fused", "addmm", "cpp_fused"]


def test_inductor_by_itself_fills_the_zeros_early():
    assert called(added_to_late_zeros) == ["cpp_fused", "addmm"]


def test_what_needs_inputs_alone_is_fused():
    wanted = called(read_with_a_sum_of_inputs)
    with in_place():
        assert called(read_with_a_sum_of_inputs) == wanted == ["cpp_fused", "addmm"]


def test_other_compilations_are_as_they_were():
    with in_place():
        called(read_and_kept)
    assert called(read_and_kept) == ["mm", "cpp_fused", "mm"]


@pytest.mark.parametrize("function", [product_and_late_sum, product_of_what_is_kept])
def test_inductor_by_itself_computes_a_product_with_a_late_sum(function):
    assert [one for one in called(function) if one != "cpp_fused"] == ["mm", "addmm"]


def test_a_product_that_frees_more_than_it_makes_does_not_wait_for_a_sum():
    with in_place():
        assert called(product_and_late_sum) == ["cpp_fused", "mm", "mm", "cpp_fused"]
        products = [one for one in called(product_of_what_is_kept) if one != "cpp_fused"]
        assert products == ["mm", "addmm"]
