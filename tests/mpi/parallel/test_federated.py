"""Federated averaging: equal to a plain loop over clients, whatever the ranks; private data; digits are learned."""

import numpy as np
import pytest
from mpi4py import MPI
from support.tiny_models import Squares, model

from collectives import Communicator
from parallel import SGD, Adam, Engine, nn
from parallel.asynchronous.decentralized.client_sampler import divide
from parallel.asynchronous.decentralized.federated import local_batches
from parallel.asynchronous.decentralized.federated_engine import FederatedEngine
from parallel.data.datasets import ArrayDataset, load
from parallel.engine.settings import Settings
from parallel.nn.flat_params import FlatParams
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

RECIPE = {"epochs": 60, "local_epochs": 1, "batch": 10, "optimizer": "sgd", "rate": 0.05}

OPTIONS = {"layout": "federated", "precision": "fp64", "clients": 7, "client_fraction": 0.5, "local_epochs": 2}


def problem(samples=41):
    random = np.random.default_rng(3)
    x = random.normal(size=(samples, 7))
    return ArrayDataset(x, np.tanh(x[:, ::-1]))


def engine_of(comm, optimizer, **options):
    return Engine(model(), Squares(), comm, optimizer, **{**OPTIONS, "batch": 4, **options})


def plain_loop(settings, rounds, rate):
    """Weights by name after rounds of federated averaging with plain descent, clients one after another."""
    made, loss, data = model(), Squares(), problem()
    flat = FlatParams(made)
    common = np.empty(flat.length)
    flat.initialise(common, 0)
    for number, clients in enumerate(rounds):
        total, samples = np.zeros(flat.length), 0
        for client, mine in clients:
            vector = common.copy()
            flat.bind(vector)
            for some in local_batches(settings, number, client, len(mine)):
                x, y = data.take(mine[some])
                gradient = np.zeros(flat.length)

                def sink(one, compute, gradient=gradient):
                    part = np.empty(one.shape)
                    compute(part)
                    FlatParams.view(gradient, one, flat.by_name[one.name].span.start)[...] += part

                scores, saved = made.forward(x, nn.PassMode())
                _, kept = loss.forward(scores, y)
                made.backward(loss.backward(1.0, kept), saved, sink)
                vector -= rate * gradient / len(some)
            total += len(mine) * vector
            samples += len(mine)
        common = total / samples
    flat.bind(common)
    return {one.name: one.data.copy() for one in made.parameters()}


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_rounds_are_those_of_a_plain_loop(comm, micro_batch):
    data, rounds = problem(), []
    with engine_of(comm, SGD(lr=0.05), micro_batch=micro_batch) as engine:
        mine = [list(step) for epoch in range(2) for step in engine.batches(data, epoch=epoch)]
        for number, clients in enumerate(mine):
            assert [client.number % comm.size for client in clients] == [comm.rank] * len(clients)
            everyone = comm.allgather([(client.number, client.samples) for client in clients if len(client.samples)])
            rounds.append(sorted((one for some in everyone for one in some), key=lambda one: one[0]))
            report = engine.step(clients)
            assert report.count == 2 * sum(len(samples) for _, samples in rounds[-1])
            assert report.step == number and engine.updates == number + 1
        found, settings = engine.state_dict(), engine.settings
        assert engine.ledger.predicted == engine.ledger.allocated
    assert len(rounds) == 2 * 2 and sorted(client for client, _ in rounds[0] + rounds[1]) == list(range(7))
    for name, values in plain_loop(settings, rounds, 0.05).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-14, err_msg=name)


def trained(comm, optimizer, resume=None, rounds=4, **options):
    with engine_of(comm, optimizer, **options) as engine:
        for epoch in range(rounds // 2):
            for number, clients in enumerate(engine.batches(problem(), epoch=epoch)):
                if resume is not None and 2 * epoch + number == rounds // 2:
                    engine.load(resume(engine))
                engine.step(clients)
        tested = engine.evaluate(*problem().take(np.arange(20)))
        return engine.state_dict(), tested.loss


def test_any_number_of_ranks_trains_the_same_with_fresh_moments(comm):
    """Adam's moments begin at 0 for every client, so nothing depends on which clients share a rank."""
    with Communicator(MPI.COMM_SELF) as alone:
        expected, loss = trained(alone, Adam(lr=0.01))
    found, tested = trained(comm, Adam(lr=0.01))
    assert tested == pytest.approx(loss, rel=1e-12)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-10, atol=1e-13)


def test_a_checkpoint_between_rounds_changes_nothing(comm, tmp_path):
    pytest.importorskip("safetensors")
    folder = comm.bcast(tmp_path)
    optimizer = SGD(lr=0.05, momentum=0.9)
    expected, loss = trained(comm, optimizer)

    def resume(engine):
        engine.save(folder)
        return folder

    found, tested = trained(comm, optimizer, resume)
    assert tested == loss and all((found[name] == values).all() for name, values in expected.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client_fraction": 0.0}, "client_fraction: expected a number above 0 and up to 1, found 0"),
        ({"client_fraction": 1.5}, "client_fraction: expected a number above 0 and up to 1, found 1.5"),
        ({"tau": 2}, "tau: it belongs to local, group, sgp, and the layout is federated"),
        ({"reproducible": True}, "reproducible: with federated"),
        ({"clients": 0}, "clients: expected a number from 1 on, found 0"),
    ],
)
def test_refused(comm, options, words):
    with pytest.raises(ValueError, match=words):
        engine_of(comm, SGD(lr=0.1), **options)


def test_what_cannot_be_federated(comm):
    with pytest.raises(ValueError, match="ema: a client's optimizer lives for a round only"):
        engine_of(comm, SGD(lr=0.1, ema=0.9))
    if comm.size > 1:
        with pytest.raises(ValueError, match=f"clients: expected {comm.size} or more, one for each rank, found 1"):
            engine_of(comm, SGD(lr=0.1), clients=1)
    with engine_of(comm, SGD(lr=0.1)) as engine:
        with pytest.raises(ValueError, match="y: a step of federated takes the samples of its clients"):
            engine.step(*problem().take(np.arange(8)))
        assert engine.steps == 0


def test_clients_without_samples(comm):
    """More clients than samples; a round of nobody leaves the weights as they are."""
    with FederatedEngine(model(), Squares(), comm, SGD(lr=0.1), Settings(layout="federated", clients=9)) as engine:
        before = [one.parameter.data.copy() for one in engine.flat.places]
        report = engine.step([(client, np.zeros((0, 7)), np.zeros((0, 7)), []) for client in engine.train_share(9)])
        assert report.count == 0 and report.skipped and np.isnan(report.loss)
        assert all((one.parameter.data == data).all() for one, data in zip(engine.flat.places, before))


@pytest.mark.timeout(300)
@pytest.mark.full
def test_digits_of_clients_with_few_labels_are_learned(comm):
    settings = complete({"data": "digits", "layout": "federated", **RECIPE})
    labels = load("digits").train.y
    kinds = [len(set(labels[part])) for part in divide(labels, 20, 2, settings.seed)]
    assert max(kinds) <= 4 and np.mean(kinds) < 3.5
    with Training(settings, comm) as training:
        list(training.run())
        assert training.score().accuracy >= 0.96
