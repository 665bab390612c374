"""Turn of a rank in a step: the passes of one micro-batch, or of none."""

from typing import NamedTuple

from parallel.data.sampler import Batch
from parallel.engine.microbatch_pass import MicrobatchPass
from parallel.engine.step_sync import Losses
from parallel.sharding.context.models_by_length import LengthModel


class MicrobatchTurn(NamedTuple):
    """Turn of a rank in a step: the model for its micro-batch, this rank's part of that (None: none), the passes."""

    number: int
    here: LengthModel
    batch: Batch | None
    passes: MicrobatchPass

    @property
    def losses(self) -> Losses:
        """Number of the micro-batch with each term of its loss."""
        return [] if self.batch is None else [(self.batch.number, loss) for loss in self.passes.losses]

    @property
    def nbytes(self) -> int:
        """Bytes of arrays held for the backward pass."""
        return self.passes.nbytes(() if self.batch is None else (self.batch.x, self.batch.y))
