"""Errors of encoded sums of 2 to 64 ranks, simulated in one process: as the laws have them."""

import math
from functools import partial

import numpy as np
import pytest
import verify_errors
from in_process import run_in_lockstep, simulated_comms

from collectives.compressed import EncodedAlltoall, QuantCodec, RingAllreduce, SegmentedAllreduce, TwoShotAllreduce
from quant import grouped, parse

RANKS = (1, 2, 3, 5, 8, 16, 33, 64)
SPECS = {
    "int8_g128": parse("int8_g128"),
    "int4_g128": parse("int4_g128"),
    "at random": grouped(5, 128, rounding="stochastic"),
}


@pytest.mark.parametrize("way", verify_errors.LAWS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_errors_follow_the_law(way, ranks, spec):
    codec, count = partial(QuantCodec, spec, None), 1 << 13
    kind, law = verify_errors.LAWS[way]
    eps = verify_errors.once(codec(0), verify_errors.noise(0, count))
    assert verify_errors.error(kind, ranks, codec, count) / eps == pytest.approx(law(ranks, eps), rel=0.05)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_of_one_scale_are_wrong_by_so_many_of_its_steps(ranks, bits):
    found = verify_errors.in_steps(ranks, bits, 128, 1 << 13)
    assert found == pytest.approx(verify_errors.of_integers(ranks), rel=0.05)


@pytest.mark.parametrize("ranks", RANKS)
def test_around_a_ring_errors_grow_with_the_root_of_the_ranks(ranks):
    assert verify_errors.around_a_ring(ranks, 1e-4) == pytest.approx(math.sqrt((ranks + 1) / 2), rel=1e-3)
    assert verify_errors.around_a_ring(ranks, 0.1) >= verify_errors.around_a_ring(ranks, 1e-4)


@pytest.mark.parametrize("kind", [TwoShotAllreduce, RingAllreduce, SegmentedAllreduce])
@pytest.mark.parametrize("count", [0, 1, 5, 127, 129, 4099])
def test_any_length_on_any_number_of_ranks(kind, count):
    for ranks in (1, 3, 7, 64) if count == 129 else (1, 3, 7):
        codec = QuantCodec(parse("int8_g32"))
        terms = [verify_errors.noise(rank, count) for rank in range(ranks)]
        total, lost = sum(terms), [np.empty(count, np.float32) for _ in range(ranks)]
        made = [kind(comm, count, codec) for comm in simulated_comms(ranks)]
        run_in_lockstep([each.allreduce(x, x, gone) for each, x, gone in zip(made, terms, lost)])
        assert len({x.tobytes() for x in terms}) == 1
        np.testing.assert_allclose(terms[0] + sum(lost), total, atol=1e-4)


def test_two_abreast_are_the_same_sum():
    codec, count, ranks = QuantCodec(parse("int4_g128")), 10_000, 6
    found = []
    for make in (TwoShotAllreduce, lambda *arguments: SegmentedAllreduce(*arguments, segments=7)):
        terms = [verify_errors.noise(rank, count) for rank in range(ranks)]
        run_in_lockstep([make(comm, count, codec).allreduce(x, x) for comm, x in zip(simulated_comms(ranks), terms)])
        found.append(terms[0].tobytes())
    assert found[0] == found[1]


def test_what_goes_to_others_is_encoded_once():
    codec, count, ranks = QuantCodec(parse("int8_g128")), 1024, 9
    terms = [verify_errors.noise(rank, count * ranks) for rank in range(ranks)]
    found = [np.empty_like(x) for x in terms]
    made = [EncodedAlltoall(comm, count, count, codec) for comm in simulated_comms(ranks)]
    run_in_lockstep([each.alltoall(x, out) for each, x, out in zip(made, terms, found)])
    sent = np.array(terms).reshape(ranks, ranks, count).swapaxes(0, 1)
    come = np.array(found).reshape(ranks, ranks, count)
    for rank in range(ranks):
        np.testing.assert_array_equal(come[rank, rank], sent[rank, rank])
    others = ~np.eye(ranks, dtype=bool)
    eps = verify_errors.once(codec, terms[0])
    assert verify_errors.relative(come[others], sent[others]) == pytest.approx(eps, rel=0.05)


def test_ranks_that_do_not_call_alike_are_found():
    x, comm = verify_errors.noise(0, 256), simulated_comms(2)[0]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for messages"):
        run_in_lockstep([TwoShotAllreduce(comm, 256, QuantCodec(parse("int8_g128"))).allreduce(x, x), iter(())])


def test_the_command_line(capsys):
    assert verify_errors.main(["--ranks", "2,5", "--specs", "int8_g128", "--elements", "8K"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("int8_g128: eps = 0.00", "shared_scale, steps", "| 5 | 1.4", "% off"))


def test_an_error_beyond_the_law_is_a_status(monkeypatch, capsys):
    monkeypatch.setitem(verify_errors.LAWS, "ring", (RingAllreduce, lambda ranks, eps: 1.0))
    assert verify_errors.main(["--ranks", "8", "--specs", "int8_g128", "--elements", "8K"]) == 1


def test_an_error_that_is_no_number_is_a_status(monkeypatch, capsys):
    monkeypatch.setitem(verify_errors.LAWS, "two_shot", (TwoShotAllreduce, lambda ranks, eps: math.nan))
    assert verify_errors.main(["--ranks", "2", "--specs", "int8_g128", "--elements", "1K"]) == 1
    assert "at most nan% off" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv,said",
    [
        (["--elements", "1K,2K"], "as in 64K; found '1K,2K'"),
        (["--elements", "0"], "an element or more"),
        (["--specs", "bogus"], "no spec 'bogus'"),
        (["--specs", "int8_row"], "a vector has no channels"),
    ],
)
def test_what_makes_no_sense_is_told(capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        verify_errors.main(argv)
    assert caught.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "2,", "2,x", "-1"])
def test_numbers_of_ranks(text, capsys):
    with pytest.raises(SystemExit):
        verify_errors.main(["--ranks", text])
    assert "expected numbers" in capsys.readouterr().err
