"""A small mixture of experts, and what it computes by a loop over tokens and experts in float64."""

from types import SimpleNamespace

import numpy as np

from parallel.nn.activation import GELU
from parallel.nn.compose import Sequential
from parallel.nn.linear import Linear
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import PassMode
from parallel.nn.router import Router

WIDTH, HIDDEN, EXPERTS = 6, 5, 8


def expert():
    return Sequential([Linear(WIDTH, HIDDEN), GELU(), Linear(HIDDEN, WIDTH)])


def mixture(settings, shared=False):
    experts = [expert() for _ in range(EXPERTS)]
    return MixtureOfExperts(Router(WIDTH, EXPERTS, settings), experts, expert() if shared else None)


def token_loop(operator, x, scale):
    """As `support.operator_cases.play`, of a mixture with values, and dy as there; loss terms count `scale` times."""
    random = np.random.default_rng(2)
    random.standard_normal(sum(place.size for place in _places(operator)))
    s, weight = operator.router.settings, operator.router.weight.data
    tokens = x.reshape((1, *x.shape) if x.ndim == 2 else (x.shape[0], int(np.prod(x.shape[1:-1])), x.shape[-1]))
    dy = random.standard_normal(x.shape).reshape(tokens.shape)
    found = SimpleNamespace(
        gradients={parameter.name: np.zeros(parameter.shape) for parameter in operator.parameters()},
        chosen=np.zeros(EXPERTS, int),
        dropped=np.zeros(EXPERTS, int),
        terms={"balance": [], "z": []},
    )

    def apply(one, row, upper=None):
        """Result of an operator for one token; with `upper`, its gradient, and those of the parameters are added."""
        y, saved = one.forward(row[None], PassMode(samples=np.zeros(1, int)))
        if upper is None:
            return y[0]
        return one.backward(upper[None], saved, lambda parameter, compute: _add(found.gradients, parameter, compute))[0]

    y, dx = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for n, rows in enumerate(tokens):
        logits = [row @ weight for row in rows]
        exponentials = [np.exp(one - one.max()) for one in logits]
        scores = [
            e / e.sum() if s.scores == "softmax" else 1 / (1 + np.exp(-one)) for e, one in zip(exponentials, logits)
        ]
        chosen = [_choice(one, s) for one in scores]
        taken = _taken(chosen, scores, s)
        count = [sum(e in some for some in chosen) for e in range(EXPERTS)]
        found.chosen += count
        found.dropped += [count[e] - sum((t, e) in taken for t in range(len(rows))) for e in range(EXPERTS)]
        shares = [one if s.scores == "softmax" else one / one.sum() for one in scores]
        factor = s.balance_loss * EXPERTS / (s.choices * max(len(rows), 1))
        found.terms["balance"].append(factor * sum(count[e] * share[e] for share in shares for e in range(EXPERTS)))
        found.terms["z"].append(s.z_loss * sum(np.log(np.exp(one).sum()) ** 2 for one in logits))
        for t, row in enumerate(rows):
            total = sum(scores[t][e] for e in chosen[t]) if s.normalize else 1.0
            dscores = np.zeros(EXPERTS)
            for e in chosen[t]:
                if (t, e) not in taken:
                    continue
                out, w = apply(operator.experts.experts[e], row), s.scale * scores[t][e] / total
                y[n, t] += w * out
                dx[n, t] += apply(operator.experts.experts[e], row, w * dy[n, t])
                dw = dy[n, t] @ out
                dscores[e] += dw * s.scale / total
                if s.normalize:
                    for other in chosen[t]:
                        dscores[other] -= dw * s.scale * scores[t][e] / total**2
            if operator.shared:
                y[n, t] += apply(operator.shared, row)
                dx[n, t] += apply(operator.shared, row, dy[n, t])
            slope = scale * factor * np.array(count)
            if s.scores == "softmax":
                jacobian = np.diag(scores[t]) - np.outer(scores[t], scores[t])
                dscores += slope
            else:
                jacobian = np.diag(scores[t] * (1 - scores[t]))
                dscores += (slope - slope @ shares[t]) / scores[t].sum()
            softmax = exponentials[t] / exponentials[t].sum()
            dlogits = jacobian @ dscores + scale * 2 * s.z_loss * np.log(np.exp(logits[t]).sum()) * softmax
            found.gradients["router.weight"] += np.outer(row, dlogits)
            dx[n, t] += weight @ dlogits
    found.y, found.dx = y.reshape(x.shape), dx.reshape(x.shape)
    return found


def _choice(scores, s):
    """Experts of a token: sorted by group and score, by hand."""
    size = EXPERTS // s.groups
    groups = [range(g * size, (g + 1) * size) for g in range(s.groups)]
    value = [sum(sorted((scores[e] for e in group), reverse=True)[: s.choices // s.chosen_groups]) for group in groups]
    best = sorted(range(s.groups), key=lambda g: (-value[g], g))[: s.chosen_groups]
    return sorted((e for g in best for e in groups[g]), key=lambda e: (-scores[e], e))[: s.choices]


def _taken(chosen, scores, s):
    """Pairs of token and expert within the capacity."""
    every = [(t, e) for t, some in enumerate(chosen) for e in some]
    if s.capacity is None:
        return set(every)
    most, taken = -int(-s.capacity * len(chosen) * s.choices // EXPERTS), set()
    for e in range(EXPERTS):
        mine = [t for t, other in every if other == e]
        if s.priority == "score":
            mine.sort(key=lambda t: (-scores[t][e], t))
        taken |= {(t, e) for t in mine[:most]}
    return taken


def _add(gradients, parameter, compute):
    part = np.zeros(parameter.shape)
    compute(part)
    gradients[parameter.name] += part


def _places(operator):
    from parallel.nn.flat_params import FlatParams

    flat = FlatParams(operator)
    return [SimpleNamespace(size=flat.length)]
