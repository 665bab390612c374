"""The backend of torch.distributed: every operation, reduction and type, against closed forms on one process."""

from datetime import timedelta
from functools import partial, reduce

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402

import collectives.torch  # noqa: E402
from collectives.torch.operations import OPERATIONS  # noqa: E402
from collectives.torch.tensors import Block  # noqa: E402

INTEGERS = ["int8", "uint8", "int16", "int32", "int64", "bool"]
DTYPES = ["float32", "float64", "float16", "bfloat16", *INTEGERS, "complex64", "complex128"]
LIMIT = timedelta(seconds=30)


@pytest.fixture(scope="module", params=["inline", "overlap"])
def group(request):
    collectives.torch.init(timeout=30, overlap=request.param == "overlap")
    yield dist.group.WORLD
    dist.destroy_process_group()


def operand(rank, length, dtype, step=1):
    """Small numbers of either sign, if the type has one, of which sums and products are exact."""
    values = (torch.arange(length) * step + rank) % 3 + 1
    if dtype == torch.bool:
        return values == 2
    values = values.to(dtype)
    return values * 1j if dtype.is_complex else values


def spread(tensor):
    """The same elements, with gaps between them."""
    return tensor.new_empty((*tensor.shape, 2))[..., 0].copy_(tensor)


LAYOUTS = {"dense": lambda tensor: tensor, "spread": spread, "transposed": lambda tensor: tensor.view(2, -1).t()}

OPS = {
    "SUM": lambda a, b: a | b if a.dtype == torch.bool else a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a & b if a.dtype == torch.bool else a * b,
    "MIN": lambda a, b: torch.minimum(a, b),
    "MAX": lambda a, b: torch.maximum(a, b),
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def is_defined(op, dtype):
    integers = not dtype.is_floating_point and not dtype.is_complex
    if op.startswith("B"):
        return integers
    return not (dtype.is_complex and op in ("MIN", "MAX")) and not (dtype == torch.bool and op == "AVG")


def total(op, terms):
    found = reduce(OPS[op], terms)
    if op == "AVG":
        whole = not found.is_floating_point() and not found.is_complex()
        found = torch.div(found, len(terms), rounding_mode="trunc" if whole else None)
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reductions(group, op, dtype, layout):
    dtype, size, rank, at = getattr(torch, dtype), group.size(), group.rank(), LAYOUTS[layout]
    if not is_defined(op, dtype):
        pytest.skip(f"{op} of {dtype}")
    terms = [operand(each, 6, dtype) for each in range(size)]
    expected = total(op, terms)
    mine = at(terms[rank].clone())
    group.allreduce(mine, getattr(ReduceOp, op)).wait()
    assert mine.equal(at(expected))
    mine = at(terms[rank].clone())
    group.reduce(mine, size - 1, getattr(ReduceOp, op)).wait()
    assert mine.equal(at(expected if rank == size - 1 else terms[rank]))
    blocks = [[operand(each + block, 4, dtype) for block in range(size)] for each in range(size)]
    mine, inputs = at(torch.zeros(4, dtype=dtype)), [at(block) for block in blocks[rank]]
    before = torch.cat(blocks[rank]).clone()
    group.reduce_scatter(mine, inputs, getattr(ReduceOp, op)).wait()
    assert mine.equal(at(total(op, [blocks[each][rank] for each in range(size)])))
    assert torch.cat(blocks[rank]).equal(before)


@pytest.mark.parametrize("factor", [0.5, torch.tensor([2.0])], ids=["number", "tensor"])
def test_sums_of_multiples(group, factor):
    op, size = dist._make_nccl_premul_sum(factor), group.size()
    mine = torch.full((2,), 2.0 * group.rank())
    dist.all_reduce(mine, op)
    assert (mine == sum(2.0 * rank * factor for rank in range(size))).all()
    inputs, mine = torch.ones(2 * size), torch.zeros(2)
    group.reduce_scatter_single(mine, inputs, dist.ReduceScatterOptions()).wait()
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    group._reduce_scatter_base(mine, inputs, options).wait()
    assert (mine == size * factor).all() and (inputs == 1).all()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn", "float8_e5m2", "uint16", "complex32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 2, 6])
def test_moved_data(group, dtype, layout, length):
    dtype, size, rank, at = getattr(torch, dtype), group.size(), group.rank(), LAYOUTS[layout]
    make = lambda each, step=1: operand(each, length, torch.float32, step).to(dtype)  # noqa: E731
    empty = lambda: at(torch.zeros(length).to(dtype))  # noqa: E731
    same = lambda found, wanted: found.tolist() == at(wanted).tolist()  # noqa: E731
    mine = at(make(rank))
    group.broadcast(mine, size - 1).wait()
    assert same(mine, make(size - 1))
    outputs = [empty() for _ in range(size)]
    group.allgather(outputs, at(make(rank))).wait()
    assert all(same(output, make(each)) for each, output in enumerate(outputs))
    outputs = [empty() for _ in range(size)]
    group.gather(outputs if rank == 0 else [], at(make(rank)), 0).wait()
    assert rank or all(same(output, make(each)) for each, output in enumerate(outputs))
    mine = empty()
    group.scatter(mine, [at(make(each, 2)) for each in range(size)] if rank == 0 else [], 0).wait()
    assert same(mine, make(rank, 2))
    outputs = [empty() for _ in range(size)]
    group.alltoall(outputs, [at(make(rank + each)) for each in range(size)]).wait()
    assert all(same(output, make(rank + each)) for each, output in enumerate(outputs))


def test_blocks_of_unequal_length(group):
    size, rank = group.size(), group.rank()
    outputs = [torch.zeros(each + 1) for each in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert all((output == each).all() for each, output in enumerate(outputs))
    mine = torch.zeros(rank + 1)
    dist.reduce_scatter(mine, [torch.full((each + 1,), float(each)) for each in range(size)])
    assert (mine == size * rank).all()
    counts, given = [each + rank for each in range(size)], torch.full((sum(range(rank, rank + size)), 2), float(rank))
    output = torch.zeros(sum(counts), 2)
    dist.all_to_all_single(output, given, counts, counts)
    assert output[:, 0].tolist() == [float(each) for each in range(size) for _ in range(each + rank)]
    with pytest.raises(ValueError, match="split sizes"):
        group.alltoall_base(output, given, [1] * (size + 1), [], timedelta(seconds=9)).wait()


def test_tensors_that_follow_one_another_are_not_copied():
    whole = torch.arange(12.0)
    for parts in (whole.split(4), whole.view(3, 4), [whole[2:]], [whole[1:3], whole[3:4]]):
        block = Block(list(parts))
        assert block.tensor.data_ptr() == parts[0].data_ptr()
        assert block.tensor.flatten().tolist() == [value for part in parts for value in part.tolist()]
    for parts in ([whole[4:8], whole[:4]], [whole[::2]], [whole[:2], whole[3:4]], [whole[:2], torch.ones(3)]):
        block = Block(parts)
        block.tensor.mul_(2)
        block.store()
        assert block.tensor.data_ptr() != parts[0].data_ptr()
        assert block.tensor.tolist() == [value for part in parts for value in part.tolist()]


def test_results_over_operands(group):
    """Operands that are part of the memory of the results, or the other way round."""
    size, rank = group.size(), group.rank()
    whole = torch.arange(2.0 * size) * (rank + 1)
    group.all_gather_single(whole, whole[2 * rank : 2 * rank + 2], dist.BarrierOptions()).wait()
    assert whole.tolist() == [value * (at // 2 + 1) for at, value in enumerate(range(2 * size))]
    group.reduce_scatter_single(whole[:2], whole, dist.ReduceScatterOptions()).wait()
    assert whole[:2].tolist() == [size * value * (rank + 1) for value in (2.0 * rank, 2.0 * rank + 1)]
    whole = torch.arange(float(size))
    group.alltoall_base(whole, whole, [], []).wait()
    assert (whole == rank).all()


RENAMED = {
    "allreduce_coalesced": "allreduce",
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


@pytest.mark.parametrize("name", [name for operation in OPERATIONS for name in operation.names.split()])
def test_names_of_all_generations(group, name):
    """Called as PyTorch's Python and C++ code call them: with options, last."""
    size, rank = group.size(), group.rank()
    operation = next(each for each in OPERATIONS if name in each.names.split())
    one, all_of = partial(torch.full, (2,)), [torch.full((2,), float(each)) for each in range(size)]
    mine, whole, options = one(float(rank)), torch.zeros(2 * size), operation.options()
    arguments = {
        "allreduce": ([mine],),
        "broadcast": ([mine],),
        "reduce": ([mine],),
        "allgather": ([[*whole.split(2)]], [mine]),
        "allgather_coalesced": ([[each] for each in whole.split(2)], [mine]),
        "all_gather_single": (whole, mine),
        "all_gather_single_coalesced": ([whole], [mine]),
        "gather": ([[*whole.split(2)]] if rank == 0 else [], [mine]),
        "scatter": ([mine], [all_of] if rank == 0 else []),
        "reduce_scatter": ([mine], [all_of]),
        "reduce_scatter_single": (mine, torch.cat(all_of)),
        "reduce_scatter_single_coalesced": ([mine], [torch.cat(all_of)]),
        "alltoall": ([*whole.split(2)], [mine] * size),
        "all_to_all_single": (whole, torch.cat([mine] * size), [], []),
        "barrier": (),
    }[RENAMED.get(name, name)]
    options.timeout = LIMIT
    work = getattr(group, name)(*arguments, options)
    assert work.wait() and work.is_completed() and work.is_success()
    assert type(work) is dist.Work or work.exception() is None  # PyTorch before 2.9 cannot convert that of its own
    if "gather" in name or "all_to" in name or "alltoall" in name:
        assert whole.equal(torch.cat(all_of)) or (rank and name == "gather")
    elif name != "barrier":
        sums = float(sum(range(size)))
        expected = {"broadcast": 0.0, "reduce": float(rank) if rank else sums, "scatter": float(rank)}
        assert mine.equal(one(expected.get(name, float(size * rank) if "scatter" in name else sums)))


def test_futures_and_coalesced_calls(group):
    size, mine = group.size(), torch.ones(3)
    future = dist.all_reduce(mine, async_op=True).get_future()
    assert future.wait()[0].equal(torch.full((3,), float(size)))
    several = [torch.ones(each) for each in range(1, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in several:
            dist.all_reduce(each)
    manager.wait()
    assert all((each == size).all() for each in several)
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([mine]), group.barrier()
    work = group._end_coalescing(torch.device("cpu"))
    assert work.wait() and work.is_completed()
    assert (mine == size * size).all()


def test_sparse_sums(group):
    size, rank = group.size(), group.rank()
    mine = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,), check_invariants=True)
    dist.all_reduce(mine)
    assert mine.to_dense().tolist() == [1.0] * size + [2.0 * size]


def test_objects(group):
    size, rank = group.size(), group.rank()
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": each} for each in range(size)]
    objects = [rank, "text", None]
    dist.broadcast_object_list(objects, size - 1)
    assert objects == [size - 1, "text", None]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert rank or gathered == [*range(size)]
    one = [None]
    dist.scatter_object_list(one, [*range(size)] if rank == 0 else [None] * size, 0)
    assert one == [rank]


def test_messages(group):
    size, rank = group.size(), group.rank()
    if size == 1:
        pytest.skip("no other rank")
    right, left = (rank + 1) % size, (rank - 1) % size
    found = [spread(torch.zeros(70_000)) for _ in range(2)]
    sent = [torch.full((70_000,), float(10 * tag + rank)) for tag in range(2)]
    operations = [dist.P2POp(dist.isend, sent[tag], right, tag=tag) for tag in (0, 1)]
    operations += [dist.P2POp(dist.irecv, found[tag], left, tag=tag) for tag in (1, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all((found[tag] == 10 * tag + left).all() for tag in (0, 1))
    if rank == 0:
        senders = {dist.recv(found[0], tag=3) for _ in range(1, size)}
        assert senders == {*range(1, size)}
    else:
        dist.send(sent[0], 0, tag=3)
    number = torch.tensor(-1.0)  # without dimensions
    sending = dist.isend(torch.tensor(float(rank)), right)
    dist.recv(number, left)
    sending.wait()
    assert number.item() == left
    work = dist.isend(sent[0], right)  # long: it goes on while both ranks wait in a collective
    dist.all_reduce(torch.ones(1))
    dist.recv(found[0], left)
    work.wait()
    assert (found[0] == left).all()


@pytest.mark.parametrize("length, found", [(3, 12), (5, "more")])
def test_messages_of_another_length(group, length, found):
    """The receive fails, not a call after it, and the group goes on."""
    size, rank = group.size(), group.rank()
    if size == 1:
        pytest.skip("no other rank")
    left, tensor = (rank - 1) % size, torch.zeros(4)
    sending, receiving = dist.isend(torch.ones(length), (rank + 1) % size), dist.irecv(tensor, left)
    dist.all_reduce(torch.ones(1))
    with pytest.raises(dist.DistBackendError, match=rf"recv #.*of 16 bytes from rank {left}, found {found}:"):
        receiving.wait()
    assert receiving.is_completed() and not receiving.is_success()
    sending.wait()
    test_messages(group)


def test_groups(group):
    size, rank = group.size(), group.rank()
    ranks = [*range(0, size, 2)][::-1]
    part, mine = dist.new_group(ranks), torch.tensor([float(rank)])
    if rank in ranks:
        dist.all_reduce(mine, group=part)
        assert mine.item() == sum(ranks)
        dist.destroy_process_group(part)
    chosen = dist.new_group(pg_options={"allreduce": "ring", "overlap": True})
    mine = torch.ones(9)
    dist.all_reduce(mine, group=chosen, async_op=True).wait()
    assert (mine == size).all()
    dist.destroy_process_group(chosen)


def test_unknown_operands(group):
    with pytest.raises(TypeError, match="one dtype"):
        group.allreduce([torch.ones(1), torch.ones(1).int()]).wait()
    with pytest.raises(TypeError):
        group.allreduce([torch.ones(2, device="meta")]).wait()
    with pytest.raises(dist.DistBackendError, match=r"allreduce #\d+ on rank \d"):
        group.allreduce([torch.ones(2)], ReduceOp.BAND).wait()
    with pytest.raises(dist.DistBackendError, match="tag"):
        group.send([torch.ones(1)], 0, -1)
    with pytest.raises(dist.DistBackendError, match="expected 0 <= rank"):
        group.recv([torch.ones(1)], group.size(), 0)


@pytest.mark.filterwarnings("ignore:end of process group")  # of ranks that made no call
@pytest.mark.ranks(3)
def test_late_ranks_are_named(group):
    size, rank, part = group.size(), group.rank(), dist.new_group()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.2)
    if size > 1 and rank == 0:  # the others make no call
        with pytest.raises(dist.DistBackendError, match=r"allreduce #1 on rank 0 of .*waited 0.2 s"):
            part.allreduce([torch.ones(1)], options).wait()
    dist.barrier()
    dist.destroy_process_group(part)
    part = dist.new_group()
    part.monitored_barrier(timedelta(seconds=20))
    if size > 1 and rank == 0:
        missing = ", ".join(map(str, range(1, size)))
        with pytest.raises(dist.DistBackendError, match=f"Ranks? {missing} failed to pass"):
            part.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
        with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass"):
            part.monitored_barrier(timedelta(seconds=0.2))
    dist.barrier()
    dist.destroy_process_group(part)


def test_messages_that_do_not_come(group):
    if group.size() == 1:
        pytest.skip("no other rank")
    group.set_timeout(timedelta(seconds=0.2))
    if group.rank() == 1:
        with pytest.raises(dist.DistBackendError, match=r"waited 0\.2 s for a message from rank 0"):
            group.recv([torch.ones(1)], 0, 99).wait()
    group.set_timeout(LIMIT)
    dist.barrier()
    if group.rank() == 0:
        dist.send(torch.ones(1), 1, tag=99)
