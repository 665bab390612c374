"""Predicted step with parameter servers: workers pull weights, compute, push gradients; servers add and update."""

from collections.abc import Sequence

from parallel.planning.measured.data_parallel_step import UnitWork
from parallel.planning.measured.message_costs import MessageCosts
from parallel.planning.measured.step_timeline import COMPUTE, IDLE, NETWORK, SHARED, StepTimeline


def server_step(
    units: Sequence[UnitWork],
    microbatches: int,
    nbytes: tuple[int, int],
    servers: int,
    messages: MessageCosts,
    server_seconds: tuple[float, float],
) -> StepTimeline:
    """Step of so many micro-batches in all, each with one push of gradients, by bulk-synchronous workers.

    `nbytes` are those of all weights and of all gradients; a server has its share of both, and sends and receives one
    message after another. `server_seconds`: to add a gradient, and to update, all of the parameters of one server.
    """
    ranks = len(messages.nodes)
    workers = ranks - servers
    cause = NETWORK if messages.over_network(range(ranks)) else SHARED
    rounds, step = -(-microbatches // workers), StepTimeline()
    pull, push = (
        sum(messages.message(0, worker, each / servers) for worker in range(servers, ranks)) for each in nbytes
    )
    add, update = server_seconds
    step.spend("pull", cause, pull)
    for turn in range(rounds):
        step.spend("draw", cause, 2 * messages.message(0, ranks - 1, 0))
        for number, unit in enumerate(units):
            step.spend(f"F{number}", COMPUTE, unit.forward)
        for number, unit in reversed([*enumerate(units)]):
            step.spend(f"B{number}", COMPUTE, unit.backward + unit.weights)
        step.spend("push", cause, push)
        step.spend("server adds", IDLE, add * min(workers, microbatches - turn * workers))
    step.spend("server updates", IDLE, update)
    return step
