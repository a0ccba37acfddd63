"""Operations give a row the same bits in every batch, block, and number of threads."""

import importlib.util
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from protocol.errors import EngineFailed
from swarm_exact import model, operations
from swarm_exact.operations import HEIGHTS, KEY_BLOCK, QUERIES_MAX, RowProducts, attend, numbers, serial_below, silu
from swarm_exact.shape import ModelShape

CPU = torch.device("cpu")


@pytest.fixture
def other_default() -> Iterator[None]:
    """Another dtype than float32, for tensors that are made without one."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 63, 64, 65, 255, 257, 600])
def test_blocks_hold_all_rows_and_pad_the_last_one_alone(rows: int) -> None:
    blocks = list(RowProducts(HEIGHTS).blocks(rows))
    assert set(blocks) <= set(HEIGHTS)
    assert sum(blocks[:-1]) < rows <= sum(blocks) if rows else not blocks


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 100])
def test_a_product_has_the_bits_of_every_row_alone(rows: int) -> None:
    weight, values = numbers((576, 192), CPU), numbers((rows, 576), CPU, 7)
    products = RowProducts.checked([(lambda part: part @ weight, 576)], CPU, HEIGHTS)
    whole = products.times(lambda part: part @ weight, values)
    alone = [products.times(lambda part: part @ weight, values[row : row + 1]) for row in range(rows)]
    assert torch.equal(whole, torch.cat(alone))
    torch.testing.assert_close(whole, values @ weight, atol=1e-4, rtol=1e-4)


def test_a_product_that_depends_on_the_number_of_rows_is_used_in_one_height() -> None:
    def uneven(values: torch.Tensor) -> torch.Tensor:
        return values * (1.0 if len(values) > 8 else 1.0 + 2**-20)

    assert RowProducts.checked([(uneven, 16)], CPU, (64, 8)).heights == (64,)


def test_a_product_that_depends_on_the_place_in_a_block_is_refused() -> None:
    def slanted(values: torch.Tensor) -> torch.Tensor:
        return values + torch.arange(len(values))[:, None]

    with pytest.raises(EngineFailed, match="cannot sample exactly"):
        RowProducts.checked([(slanted, 16)], CPU, (64, 8))


def test_a_product_that_depends_on_the_threads_is_refused() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(EngineFailed, match="2 threads"):
            RowProducts.checked([(lambda values: values + torch.get_num_threads(), 16)], CPU, (64, 8))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("length", [1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 3 * KEY_BLOCK])
def test_attention_has_the_bits_of_a_row_alone_whatever_lies_beside_and_behind_it(length: int) -> None:
    kv_heads, heads, head, rows = 2, 3, 16, 5
    cache = numbers((2, 4, rows, kv_heads, KEY_BLOCK, head), CPU)
    query = numbers((rows, kv_heads, heads, head), CPU, 3)
    longer = torch.tensor([length - 1, 0, 4 * KEY_BLOCK - 1, 77, length - 1])
    together = attend(query, cache[0], cache[1], None, longer)
    alone = attend(query[:1], cache[0, :, :1], cache[1, :, :1], torch.tensor([0]), longer[:1])
    assert torch.equal(together[:1], alone)
    dirty = cache.clone()
    block, place = divmod(length, KEY_BLOCK)
    if block < 4:
        dirty[:, block, 0, :, place:] = 5.0  # what an earlier sample left
    assert torch.equal(attend(query[:1], dirty[0], dirty[1], torch.tensor([0]), longer[:1]), alone)
    keys, values = (part[:, 0].transpose(1, 2).reshape(-1, kv_heads, head)[:length] for part in cache)
    expected = torch.nn.functional.scaled_dot_product_attention(query[0], keys.transpose(0, 1), values.transpose(0, 1))
    torch.testing.assert_close(together[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [QUERIES_MAX, QUERIES_MAX + 1, 2 * QUERIES_MAX + 3])
def test_attention_of_many_rows_has_the_bits_of_each_alone(count: int) -> None:
    cache = numbers((2, 2, count + 2, 1, KEY_BLOCK, 16), CPU)  # with rows that no token uses
    query, places = numbers((count, 1, 2, 16), CPU, 3), torch.arange(count) * 37 % (2 * KEY_BLOCK)
    together = attend(query, cache[0], cache[1], None, places)
    for row in (0, QUERIES_MAX - 1, count - 1):
        own = torch.tensor([row])
        assert torch.equal(together[row : row + 1], attend(query[own], cache[0], cache[1], own, places[own]))


def test_silu_is_that_of_torch_and_has_the_bits_of_each_value_alone() -> None:
    values = torch.cat((numbers((4099,), CPU) * 30, torch.tensor([0.0, -0.0, 1e-30, -88.0, 88.0, 1e4, -1e4])))
    result = silu(values)
    torch.testing.assert_close(result, torch.nn.functional.silu(values.double()).float(), atol=1e-30, rtol=1e-6)
    assert torch.equal(result, torch.cat([silu(part.clone()) for part in torch.split(values, 5)]))
    assert math.isnan(float(silu(torch.tensor([math.nan]))[0]))


@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 7), (1, 3), (2, 7), (3, 3)])
def test_attention_has_the_bits_of_one_thread_with_several(kv_heads: int, heads: int) -> None:
    head, rows = 64, 40
    cache = numbers((2, 3, rows, kv_heads, KEY_BLOCK, head), CPU)
    query, places = numbers((rows, kv_heads, heads, head), CPU, 3), torch.arange(rows) * 4 + 30
    expected = attend(query, cache[0], cache[1], None, places, serial=sys.maxsize)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        serial = serial_below(kv_heads, heads, head, CPU)
        for count in (1, 2, 3, 5, 8, 17, 33):
            chosen = torch.arange(count)
            some = attend(query[:count], cache[0], cache[1], chosen, places[:count], serial=serial)
            assert torch.equal(some, expected[:count])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_attention_of_few_tokens_uses_one_thread_if_more_give_other_bits() -> None:
    def divided(*given: Any) -> torch.Tensor:
        return attend(*given) + 2**-20 * (len(given[0]) < 6 and torch.get_num_threads() > 1)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert serial_below(2, 4, 16, CPU, divided) == 6
        assert serial_below(2, 4, 16, CPU, lambda *given: attend(*given) + torch.get_num_threads()) == sys.maxsize
    finally:
        torch.set_num_threads(before)


def test_attention_that_depends_on_the_number_of_tokens_is_refused() -> None:
    with pytest.raises(EngineFailed, match="number of tokens"):
        serial_below(2, 4, 16, CPU, lambda *given: attend(*given) + len(given[0]))


@pytest.mark.usefixtures("other_default")
def test_no_bit_depends_on_the_default_dtype_of_the_program() -> None:
    """A program that loads models in 16 bits may have set it."""
    spec = importlib.util.spec_from_file_location("imported_again", operations.__file__)
    assert spec
    assert spec.loader
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    values = 20 * numbers((8, 64), CPU)
    assert torch.equal(again.silu(values), silu(values))
    assert again.silu(values).dtype == torch.float32
    shape = ModelShape(64, 48, 1, 2, 1, 24, 96, 1e-6, 1e4, tied=True, normed=True, biased=True)
    found = model.probe(shape, CPU)
    torch.set_default_dtype(torch.float32)
    assert found == model.probe(shape, CPU)
