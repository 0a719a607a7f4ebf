"""Text that a model goes on with, to look at what it has learnt: the whole model in one process, without a plan.

Owns the choice of tokens. Every token is computed from all before it, anew: good for some hundred tokens, no server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from shoal_planner.errors import InvalidField
from shoal_planner.job import ModelSpec
from shoal_planner.parameters import parameters
from shoal_workers.exchange import SoloExchange
from shoal_workers.first_values import FirstValues
from shoal_workers.model import Block, Embedding, Head, Weights, rotary_of
from shoal_workers.own_modules import OwnBlock, OwnFirst, OwnLast, OwnUnits
from shoal_workers.products import ByAutograd
from shoal_workers.remaking import keeping
from shoal_workers.tensor_parallel import TensorGroup

_CPU = torch.device("cpu")


class Generator:
    """Of a model for contexts of at most `positions` tokens, of which nothing is forgotten; of learned positions there
    must be as many."""

    def __init__(self, model: ModelSpec, values: FirstValues, positions: int) -> None:
        self._model, self._positions = model, positions
        self._found = {
            parameter.fqn: values(parameter, 0, parameter.numel).view(parameter.shape)
            for parameter in parameters(model)
        }
        group = TensorGroup(rank=0, size=1, reducer=SoloExchange())
        self._own: list[OwnFirst | OwnBlock | OwnLast] = []
        if model.own_shape is not None:
            units = OwnUnits(model, 0, _CPU, torch.float32)
            self._own = [units.unit(number, self._weight, group) for number in range(model.layers + 2)]
            return
        weights = Weights(model=model, lookup=self._weight, group=group)
        rotary = rotary_of(model, positions, _CPU)
        self._embedding = Embedding(weights)
        self._blocks = [Block(model, layer, weights, rotary, keeping, ByAutograd()) for layer in range(model.layers)]
        self._head = Head(model, weights, ByAutograd())

    def _weight(self, fqn: str, number: int = 0) -> Tensor:
        return self._found[fqn]

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Of the token after each of these, float32 [B, S, vocab]."""
        if self._own:
            for unit in self._own:
                tokens_BS = unit.module(tokens_BS)
            return tokens_BS.float()
        x_BSH = self._embedding(tokens_BS)
        for block in self._blocks:
            x_BSH = block(x_BSH)
        return self._head.logits(x_BSH)

    def goes_on(
        self,
        tokens: Sequence[int],
        count: int,
        temperature: float = 0.0,
        seed: int = 0,
        ends: Collection[int] = (),
        penalty: float = 1.0,
    ) -> Iterator[int]:
        """At most so many more tokens, until one of `ends`, or until all positions are taken: the likeliest at a
        temperature of 0, else drawn with this seed. A `penalty` above 1 makes those less likely that stand there
        already. Raises InvalidField."""
        if not tokens:
            raise InvalidField("prompt", "", "must have at least one token")
        above = [token for token in tokens if not 0 <= token < self._model.vocab]
        if above:
            raise InvalidField("prompt", above[0], f"is no token of the model, which knows {self._model.vocab}")
        whole, random = list(tokens), torch.Generator().manual_seed(seed)
        for _ in range(min(count, self._positions + 1 - len(tokens))):
            logits_V = _penalised(self.logits(torch.tensor([whole]))[0, -1], whole, penalty)
            token = int(logits_V.argmax()) if temperature == 0 else _drawn(logits_V / temperature, random)
            if token in ends:
                return
            yield token
            whole.append(token)


def _penalised(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """As in transformers, each of these once, whether it is of the prompt or came after it (Keskar et al. 2019, 4.1;
    there logits are divided whatever their sign)."""
    there = torch.tensor(sorted(set(tokens)))
    before = logits_V[there]
    return logits_V.index_put((there,), torch.where(before < 0, before * penalty, before / penalty))


def _drawn(logits_V: Tensor, random: torch.Generator) -> int:
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=random))
