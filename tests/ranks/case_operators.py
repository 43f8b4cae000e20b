"""Every operator rule against one card: forward and gradient, for all placements that the rule accepts.

A few more layouts of the inputs, drawn at random, bring redistributions, averages and varying tensors into the game.
Some calls on one axis; all at night on a 2x2 mesh, which tests in one process and random programs also have.
"""

import numpy as np
from accepted import AXES, accepted, at_random
from direct_calls import DirectCall
from mindspore_calls import CALLS
from one_card import check, draw, is_float
from operator_calls import ALL_CALLS
from recorded_rules import rules_met
from support.launch import on_ranks

from mindformers_core.communication import world
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh

# Drawn; and steps of the algorithm of Fp8RoundGradient, which is compared, and of a maximum that Fp8Round is given
APART = {"Dropout", "Fp8Largest", "Fp8Probe", "Fp8Probed"}
MORE = {"rule": 1, "function": 1}  # combinations drawn at random for one call
EACH = {2: 12, 4: 1}  # world size -> of so many calls one


@on_ranks(2, nightly=(4,))
def case_operators_equal_one_card():
    """By the name of the rule: every registered operator that has a kernel on CPU and isn't random."""
    mesh, failures = mesh_of_all(), []
    calls = [call for call in ALL_CALLS if call.runs == "CPU" and not call.broken and call.name not in APART]
    for call in calls[:: EACH[world().size]]:
        direct = DirectCall(call)
        floats = list(map(is_float, direct.values))
        choices = list(accepted(direct.signature, floats, mesh))
        choices += _more("rule", direct.values, mesh)
        tolerance = 2e-3 if _is_half(call) else 1e-5
        _collect(failures, str(call), direct, direct.values, choices, tolerance, not call.gradient)
    assert not failures, f"{len(failures)} of {len(calls)} operators fail:\n" + "\n".join(failures)


@on_ranks(2, nightly=(4,))
def case_what_authors_write_equals_one_card():
    """As an author calls them, with all placements that any of the rules met accepts of the function's own inputs."""
    mesh, failures = mesh_of_all(), []
    for name, (function, inputs) in [*CALLS.items()][:: EACH[world().size]]:
        random = np.random.default_rng(7)
        values = [draw(random, shape, kind) for kind, shape in inputs]
        whole = [Layout.on(mesh, ((),) * value.ndim) for value in values]
        choices = {tuple(whole): None}
        for places, floats, signature in rules_met(function, values, whole):
            for layouts in accepted(signature, floats, mesh):
                given = dict(zip(places, layouts))
                choices[tuple(given.get(place, layout) for place, layout in enumerate(whole))] = None
        _collect(failures, name, function, values, [*choices, *_more("function", values, mesh)])
    assert not failures, f"{len(failures)} of {len(CALLS)} functions fail:\n" + "\n".join(failures)


def mesh_of_all():
    """All ranks on one axis; four on two."""
    return init_device_mesh((2,), ("tp",)) if world().size == 2 else init_device_mesh((2, 2), AXES)


def _more(what, values, mesh):
    floats = list(map(is_float, values))
    return at_random([value.shape for value in values], floats, mesh, np.random.default_rng(7), MORE[what])


def _is_half(call):
    return 42 in [argument for argument in (*call.args, *call.named.values()) if isinstance(argument, int)]


def _collect(failures, name, function, values, choices, tolerance=1e-5, differentiable=True):
    try:
        check(name, function, values, choices, tolerance, tolerance, differentiable)
    except Exception as error:  # collected, so that one run shows all: ranks run on in step, since they fail alike
        failures.append(f"{name}: {type(error).__name__}: {error}"[:900])
        print(failures[-1], flush=True)
