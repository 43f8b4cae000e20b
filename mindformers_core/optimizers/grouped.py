"""The optimizer of settings: one for each group of parameters with a rate and a decay of their own."""

from dataclasses import fields

import mindspore as ms
from mindspore import nn, ops
from mindspore.experimental import optim

from mindformers_core.lazy_exports import import_object
from mindformers_core.optimizers.settings import DecaySettings
from mindformers_core.scopes import errors_at

_COMMON = {entry.name for entry in fields(DecaySettings)}


class GroupedOptimizer(nn.Cell):
    """Updates `parameters` by the optimizer that `settings` name, as they say of each: an `Optimizer` of `components`.

    Groups are those of one rate and one decay; an optimizer is made for each. An optimizer of MindSpore's is one for
    all, with groups of its own.

    Args:
        parameters: the trainable parameters of this rank.
        settings: an `OptimizerSettings`, as `AdamWSettings`, or a recipe's section `optimizer`.

    Attributes:
        parameters, settings: as given.
        placed: of each parameter the `Placed`, in the same order.
        members: the optimizers.
        scalar_names: of what `scalars` returns, alike on ranks with other parameters.
        average: the `AveragedWeights` of the parameters, which is called after a step; or None.

    Raises:
        TypeError, ValueError: a class that isn't as `components.Optimizer` says, or refuses its settings.
    """

    def __init__(self, parameters, settings):
        super().__init__(auto_prefix=False)  # parameters and states keep their names
        self.parameters, self.settings, self.average = ms.ParameterTuple(parameters), settings, None
        self.placed = [settings.placed(p.name, len(getattr(p, "global_shape", p.shape))) for p in parameters]
        kind = import_object(getattr(settings, "component", settings.type), "optimizer.type")
        members, places, groups = self._made(kind) if parameters else ([], [], [])
        self.rates = [rate for rate, _ in groups]
        self.members, self.places = nn.CellList(members, auto_prefix=False), tuple(places)
        counts = [len(_scalars(member, 1, 0.0)) for member in members]
        self.ends = tuple((sum(counts[:index]), sum(counts[: index + 1])) for index in range(len(counts)))
        self.scalar_names = [name for group, count in zip(groups, counts) for name in _names(*group, count)]

    def _made(self, kind):
        """The optimizers, the places of their parameters, and their factors of the rate and decays."""
        where, settings = f"optimizer.type: {self.settings.type}: ", self.settings
        with errors_at(where):
            _check_kind(kind)
        own = {entry.name for entry in fields(settings)} - _COMMON
        keywords, groups = {name: getattr(settings, name) for name in own}, {}
        for place, placed in enumerate(self.placed):
            groups.setdefault((placed.rate, placed.decay), []).append(place)
        if issubclass(kind, nn.Optimizer):
            given = [
                {"params": [self.parameters[place] for place in places], "weight_decay": decay, "lr": 1.0}
                for (_, decay), places in groups.items()
            ]
            with errors_at(where):
                made = kind([*given, {"order_params": list(self.parameters)}], learning_rate=1.0, **keywords)
            factors = [(places[0], rate) for (rate, _), places in groups.items()]
            return [RatedOptimizer(made, factors)], [tuple(range(len(self.parameters)))], [(1.0, 0.0)]
        members = []
        for (_, decay), places in groups.items():
            decays = {"weight_decay": decay} if hasattr(settings, "weight_decay") else {}
            with errors_at(where):
                members.append(kind([self.parameters[place] for place in places], **keywords, **decays))
        return members, [*map(tuple, groups.values())], [*groups]

    def construct(self, gradients, *scalars):
        """One step; `scalars` as of the method."""
        for index, member in enumerate(self.members):
            own = ()
            for place in self.places[index]:
                own = own + (gradients[place],)
            begin, end = self.ends[index]
            member(own, *scalars[begin:end])

    def scalars(self, step, learning_rate):
        """The scalars of all members for the step of this number, from 1 on: a tuple of tensors."""
        pairs = zip(self.members, self.rates)
        return tuple(each for member, rate in pairs for each in _scalars(member, step, rate * learning_rate))


def _scalars(member, step, learning_rate):
    if hasattr(member, "scalars"):
        return tuple(member.scalars(step, learning_rate))
    return (ms.Tensor(learning_rate, ms.float32),)


def _names(rate, decay, count):
    first = "rate" if rate == 1.0 else f"rate x {rate:g}"
    return [first, *(f"scalar {place} at decay {decay:g}, {first}" for place in range(1, count))][:count]


def _check_kind(kind):
    if not isinstance(kind, type) or not issubclass(kind, nn.Cell):
        raise TypeError(f"{kind!r} is no class of Cells: its Parameters are the state, and construct is the step")
    if issubclass(kind, optim.Optimizer):
        raise TypeError("optimizers of mindspore.experimental keep their rates on the host: name one of mindspore.nn")


class RatedOptimizer(nn.Cell):
    """A `mindspore.nn.Optimizer` whose learning rate is given at every step.

    Args:
        optimizer: with groups that have a learning rate each.
        factors: of the rate: pairs (place of a parameter of a group, factor).
    """

    def __init__(self, optimizer, factors):
        super().__init__(auto_prefix=False)
        self.optimizer, self.factors = optimizer, tuple(factors)

    def construct(self, gradients, rate):
        for place, factor in self.factors:
            ops.assign(self.optimizer.learning_rate[place], rate * factor)
        self.optimizer(gradients)
