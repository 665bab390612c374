"""Collectives with compressed messages, and the error that the encoding causes.

A codec encodes numbers as bytes. The collective decides how often that happens along the path, and so how large the
error becomes. eps is the error of one encoding, p the number of ranks:

    collective     what is encoded                                     error of a sum        bytes sent
    two_shot       every rank's terms, then the sums                   sqrt(2) eps           2 (p-1)/p n'
    ring           a partial sum at each hop, then the sums            sqrt((p+1)/2) eps     2 (p-1)/p n'
    hierarchical   the sums of nodes, then the sums of all             sqrt(2) eps of these  2 (k-1)/k n' of a node
    shared_scale   every rank's terms, as integers of one scale: sums  sqrt(p/12) steps      2 (p-1)/p n''
                   of integers are exact, in any order
    alltoall       blocks for other ranks                              eps                   (p-1)/p n'

A step is the step of the shared scale, given by the largest element of all ranks. n' is the number of bytes of an
encoded vector, n'' of a vector of integers wide enough for the sum. k is the number of nodes. The errors are relative
to the error of one rank's terms if errors are independent: sums of p terms of size 1 are of size sqrt(p), and so is
the error of adding p encoded terms. docs/guide/compression.md derives them.

Every collective is a generator that yields requests to wait for, so that the caller may compute meanwhile:

    for requests in motion:
        wait_all(requests)

`run` does just that. `SegmentedAllreduce` encodes one segment while another is in flight.
"""

from collectives.compressed.bound_collective import Motion, run
from collectives.compressed.codec import Codec, QuantCodec
from collectives.compressed.encoded_alltoall import EncodedAlltoall
from collectives.compressed.partition import VectorPartition
from collectives.compressed.segmented_allreduce import HierarchicalAllreduce, SegmentedAllreduce, crowded
from collectives.compressed.shared_scale import SharedScale
from collectives.compressed.two_shot_and_ring import FlatAllreduce, RingAllreduce, TwoShotAllreduce

__all__ = [
    "Codec",
    "EncodedAlltoall",
    "FlatAllreduce",
    "HierarchicalAllreduce",
    "Motion",
    "QuantCodec",
    "RingAllreduce",
    "SegmentedAllreduce",
    "SharedScale",
    "TwoShotAllreduce",
    "VectorPartition",
    "crowded",
    "run",
]
