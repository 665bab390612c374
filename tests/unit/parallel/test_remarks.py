"""Remarks of engines: where a model was trained, and whose optimizer state continues."""

from copy import deepcopy

import pytest
from conformance.thread_communicator import run_threads
from support.differential.tasks import MLP

from parallel import LAMB, SGD, Adam, AdamW, Engine


@pytest.mark.parametrize("settings", [{"layout": "local", "tau": 2}, {"layout": "group"}, {"layout": "zero3"}])
def test_layout_that_has_trained_a_copy(settings):
    """Which has no values: they are the engine's."""

    def run(comm):
        model = MLP.model()
        with Engine(model, MLP.loss(), comm, SGD(lr=0.1), **settings) as engine:
            engine.step(*MLP.batch(0, 8))
            names = {parameter.trained_in for parameter in model.parameters()}
            made = deepcopy(model)
        for parameter in made.parameters():
            parameter._set(None)
        with Engine(made, MLP.loss(), comm, SGD(lr=0.1)) as engine:
            return names, engine.remarks

    layout = settings["layout"]
    for names, remarks in run_threads(2, run):
        assert names == {layout} and any(f"an engine of layout {layout} has trained it" in one for one in remarks)


@pytest.mark.parametrize(("first", "then", "word"), [(AdamW, LAMB, "adamw"), (Adam, AdamW, "adam"), (AdamW, AdamW, "")])
def test_state_of_another_optimizer(first, then, word, tmp_path):
    def run(comm):
        for kind in (first, then):
            with Engine(MLP.model(), MLP.loss(), comm, kind(lr=0.01), layout="zero1") as engine:
                if kind is first and not engine.steps and not (tmp_path / "step-000000001").is_dir():
                    engine.step(*MLP.batch(0, 8))
                    engine.save(tmp_path)
                else:
                    engine.load(tmp_path)
                    return engine.remarks

    for remarks in run_threads(2, run):
        named = [one for one in remarks if f"m, v are those of {word}, and {then.__name__.lower()} continues" in one]
        assert bool(named) == bool(word)
