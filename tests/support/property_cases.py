"""Properties that users set on parameters, in a training whose tensors are cut in every way that there is."""

import numpy as np

from parallel import AdamW, Engine, nn
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.models import transformer
from parallel.nn.operator import name_all
from parallel.nn.router import RouterSettings

TOKENS, LENGTH, WIDTH = 32, 8, 8


def model():
    """Two blocks, the second with four experts; the embedding and the output share a weight."""
    return transformer(TOKENS, LENGTH, 2, 2, WIDTH, experts=ExpertLayers(4, RouterSettings(), every=2))


def chosen(whole):
    """Parameters of every kind of cut: by tokens, columns, rows, of biases and experts; and one that is whole."""
    attention, feed_forward = (half.inner.items for half in whole.items[1].items)
    expert = whole.items[2].items[1].inner.items[1].experts.experts[2]
    return [
        whole.items[0].items[0].weight,
        attention[1].weight,
        attention[3].weight,
        feed_forward[1].bias,
        feed_forward[3].bias,
        attention[0].gain,
        *expert.parameters(),
    ]


def batch(step):
    tokens = np.random.default_rng(step).integers(0, TOKENS, (4, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def shrunk_by_norm(gradient):
    """Hook whose result depends on all elements."""
    return gradient / (1 + np.linalg.norm(gradient))


class Recorder:
    """Hook that changes gradients in place and keeps their shapes and sums."""

    def __init__(self):
        self.seen = []

    def __call__(self, gradient):
        gradient *= 2
        self.seen.append((gradient.shape, float(np.abs(gradient).sum())))


def groups_of(whole, case):
    if not case.startswith("groups"):
        return ()
    name_all(whole)
    some = [one.name if case == "groups by name" else one for one in chosen(whole)]
    return [{"params": some[:2], "lr": 0.0}, {"params": some[2:], "lr": 0.1, "weight_decay": 0.3}]


class Hooks:
    """Two hooks of each of some parameters, from step 1 to step 3."""

    def __init__(self):
        self.recorders, self._handles = {}, []

    def change(self, whole, step):
        for one in chosen(whole) if step == 1 else ():
            self.recorders[one.name] = Recorder()
            self._handles += [one.register_hook(shrunk_by_norm), one.register_hook(self.recorders[one.name])]
        for handle in self._handles if step == 4 else ():
            handle.remove()


def decay(whole, step):
    """Some parameters, and others no longer, decay from step 1 on."""
    for one in chosen(whole) if step == 1 else ():
        one.decay = not one.decay


def freeze(whole, step):
    """Some parameters are frozen in the steps 1 and 2."""
    for one in chosen(whole) if step in (1, 3) else ():
        one.requires_grad = step == 3


def trained(comm, case, steps=5, **settings):
    """State after some steps with the properties of a case, and what hooks saw by parameter."""
    whole = model()
    optimizer = AdamW(lr=0.01, weight_decay=0.2, groups=groups_of(whole, case))
    about = {"precision": "fp64", "batch": 4, "check_every": 1}
    if "layout" not in settings:
        about["micro_batch"] = 4
    hooks = Hooks()
    change = {"decay": decay, "frozen": freeze, "hooks": hooks.change}.get(case, lambda whole, step: None)
    with Engine(whole, nn.SoftmaxCrossEntropy(), comm, optimizer, **about, **settings) as engine:
        for step in range(steps):
            change(whole, step)
            engine.step(*batch(step))
        return engine.state_dict(), {name: one.seen for name, one in hooks.recorders.items()}


CASES = ("groups by object", "groups by name", "decay", "frozen", "hooks")


def expect_equal(every, expected):
    """Compare the state of every rank, and what the hooks of all ranks saw, with those of one rank."""
    whole, seen = expected
    for state, _ in every:
        assert state.keys() == whole.keys()
        for name, values in state.items():
            np.testing.assert_allclose(values, whole[name], rtol=1e-9, atol=1e-12, err_msg=name)
    for name, calls in seen.items():
        found = [call for _, hooks in every for call in hooks[name]]
        assert {shape for shape, _ in found} == {shape for shape, _ in calls}, name
        ours, theirs = (sorted({round(total, 9) for _, total in some}) for some in (found, calls))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)
