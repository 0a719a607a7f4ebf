"""Runs programs in the abstract: an order in which they can happen, or the reason why none exists.

Owns the rules that every set of programs must keep. A size or order mismatch would abort the whole process inside the
communication library, so programs are proven before they touch a network.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator

from shoal_planner.errors import ScheduleError
from shoal_planner.programs import (
    Backward,
    Forward,
    Gather,
    InputGradient,
    Instruction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    Vote,
    WeightGradient,
)

_SENDS = (SendActivation, SendGradient)
_RECEIVES = (ReceiveActivation, ReceiveGradient)
_MEETINGS = (Reduce, Vote, Gather)  # every rank that names one waits for all others that name it
_Message = tuple[int, int, bool]  # sender, receiver, is it an activation
_Rows = tuple[int, int, int, int, int]  # micro-batch, the sender's chunk, the receiver's, first and last row
_Passed = tuple[type, int, int]  # Forward or InputGradient (also of a whole backward), chunk, micro-batch


def prove(programs: tuple[Program, ...]) -> None:
    """Raises ScheduleError unless the programs can run to their end and every rank does the step's whole work.

    Checked: each send has one receive of the same rows and, between each pair, in the same order; each micro-batch goes
    forward and then backward once through each chunk, whole or split into the gradients of input and weights, between
    its receives and its sends; all gradients are there before they are reduced, and reduced before the vote, the vote
    comes before the update, the update before the gathers; and no rank waits for ever.
    """
    for rank, program in enumerate(programs):
        _prove_order(rank, program)
        _prove_rows(rank, program)
    _prove_messages(programs)
    for _ in ordered(programs):
        pass


def ordered(programs: tuple[Program, ...]) -> Iterator[tuple[int, Instruction]]:
    """All instructions with their rank, each after everything that it waits for. Raises ScheduleError at a deadlock.

    A meeting (Reduce, Vote, Gather) comes only when all its ranks stand before it, and then for all of them in a row.
    """
    members: dict[Instruction, list[int]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for instruction in program:
            if isinstance(instruction, _MEETINGS):
                members[instruction].append(rank)
    position = [0] * len(programs)
    arrived: dict[Instruction, int] = defaultdict(int)
    sent: set[tuple[_Message, _Rows]] = set()
    waiting: dict[tuple[_Message, _Rows], int] = {}
    ready = deque(range(len(programs)))
    while ready:
        rank = ready.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            instruction = program[position[rank]]
            if isinstance(instruction, _MEETINGS):
                arrived[instruction] += 1
                if arrived[instruction] == len(members[instruction]):
                    for member in members[instruction]:
                        yield member, instruction
                        position[member] += 1
                    ready.extend(member for member in members[instruction] if member != rank)
                    continue
                break
            if isinstance(instruction, _RECEIVES):
                key = _received(rank, instruction)
                if key not in sent:
                    waiting[key] = rank
                    break
                sent.discard(key)
            elif isinstance(instruction, _SENDS):
                key = _sent(rank, instruction)
                sent.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
            yield rank, instruction
            position[rank] += 1
    for rank, program in enumerate(programs):
        if position[rank] < len(program):
            raise ScheduleError(rank, f"waits for ever at {program[position[rank]]}")


def _sent(rank: int, send: SendActivation | SendGradient) -> tuple[_Message, _Rows]:
    rows = (send.micro_batch, send.chunk, send.peer_chunk, send.first, send.last)
    return (rank, send.peer, isinstance(send, SendActivation)), rows


def _received(rank: int, receive: ReceiveActivation | ReceiveGradient) -> tuple[_Message, _Rows]:
    rows = (receive.micro_batch, receive.peer_chunk, receive.chunk, receive.first, receive.last)
    return (receive.peer, rank, isinstance(receive, ReceiveActivation)), rows


def _prove_messages(programs: tuple[Program, ...]) -> None:
    sends: dict[_Message, list[_Rows]] = defaultdict(list)
    receives: dict[_Message, list[_Rows]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for instruction in program:
            if isinstance(instruction, _SENDS):
                pair, rows = _sent(rank, instruction)
                sends[pair].append(rows)
            elif isinstance(instruction, _RECEIVES):
                pair, rows = _received(rank, instruction)
                receives[pair].append(rows)
    for pair in sends.keys() | receives.keys():
        sender, receiver, is_activation = pair
        for rows in (*sends[pair], *receives[pair]):
            if sender == receiver or not rows[3] < rows[4]:
                raise ScheduleError(sender, f"sends {rows} to {receiver}: needs another rank and at least one row")
        if len(set(sends[pair])) != len(sends[pair]):
            raise ScheduleError(sender, f"sends the same rows twice to rank {receiver}")
        if sends[pair] != receives[pair]:
            what = "activations" if is_activation else "gradients"
            detail = f"sends {what} {sends[pair][:3]}..., which rank {receiver} receives as {receives[pair][:3]}..."
            raise ScheduleError(sender, detail)


def _prove_order(rank: int, program: Program) -> None:
    forwards = _numbers(program, Forward)
    batches, chunks = ({entry[place] for entry in forwards} for place in (1, 0))
    whole = list(itertools.product(range(len(chunks)), range(len(batches))))
    if not forwards or sorted(forwards) != whole:
        raise ScheduleError(rank, f"forwards {_short(forwards)} are not each micro-batch once in each chunk")
    backwards, inputs, weights = (_numbers(program, kind) for kind in (Backward, InputGradient, WeightGradient))
    if sorted(backwards + inputs) != whole:
        raise ScheduleError(rank, f"backwards {_short(backwards + inputs)} do not match forwards {_short(forwards)}")
    if sorted(weights) != sorted(inputs):
        problem = f"gradients of weights {_short(weights)} do not match those of inputs {_short(inputs)}"
        raise ScheduleError(rank, problem)
    phases = [_phase(item) for item in program]
    if phases != sorted(phases):
        raise ScheduleError(rank, "must finish micro-batches, then reduce, vote, update and gather, in this order")
    if phases.count(2) != 1 or phases.count(3) != 1:
        raise ScheduleError(rank, "must vote once and update once")
    reduced = [item.unit for item in program if isinstance(item, Reduce)]
    gathered = [item.unit for item in program if isinstance(item, Gather)]
    if not reduced or len(set(reduced)) != len(reduced) or sorted(gathered) != sorted(reduced):
        raise ScheduleError(rank, f"reduces units {reduced} and gathers {gathered}: must be the same, each once")


def _numbers(
    program: Program, kind: type[Forward | Backward | InputGradient | WeightGradient]
) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of all instructions of this kind."""
    return [(item.chunk, item.micro_batch) for item in program if isinstance(item, kind)]


def _short(numbers: list[tuple[int, int]]) -> str:
    """Micro-batches alone where there is one chunk."""
    return str([number for _, number in numbers] if not any(chunk for chunk, _ in numbers) else numbers)


def _phase(instruction: Instruction) -> int:
    for phase, kind in ((1, Reduce), (2, Vote), (3, Update), (4, Gather)):
        if isinstance(instruction, kind):
            return phase
    return 0


def _prove_rows(rank: int, program: Program) -> None:
    """Per micro-batch: receives before the work they feed, sends after the work that makes them, whole rows."""
    done: set[_Passed] = set()
    rows: dict[_Passed, list[tuple[int, int]]] = defaultdict(list)
    for item in program:
        match item:
            case Forward():
                done.add((Forward, item.chunk, item.micro_batch))
            case Backward() | InputGradient():
                if (Forward, item.chunk, item.micro_batch) not in done:
                    raise ScheduleError(rank, f"runs {item} before its forward")
                done.add((InputGradient, item.chunk, item.micro_batch))
            case WeightGradient():
                if (InputGradient, item.chunk, item.micro_batch) not in done:
                    raise ScheduleError(rank, f"runs {item} before the gradient of its input")
            case ReceiveActivation() | ReceiveGradient():
                needed = Forward if isinstance(item, ReceiveActivation) else InputGradient
                if (needed, item.chunk, item.micro_batch) in done:
                    raise ScheduleError(rank, f"{item} comes after the work that needs it")
                rows[needed, item.chunk, item.micro_batch].append((item.first, item.last))
            case SendActivation() | SendGradient():
                maker = Forward if isinstance(item, SendActivation) else InputGradient
                if (maker, item.chunk, item.micro_batch) not in done:
                    raise ScheduleError(rank, f"{item} comes before the work that makes it")
            case Reduce() | Vote() | Update() | Gather():
                pass
    _prove_whole(rank, rows, len({number for _, _, number in done}))


def _prove_whole(rank: int, rows: dict[_Passed, list[tuple[int, int]]], micro_batches: int) -> None:
    spans: set[tuple[int, int]] = set()
    for (work, chunk, number), parts in rows.items():
        parts.sort()
        if any(before[1] != after[0] for before, after in itertools.pairwise(parts)):
            raise ScheduleError(rank, f"receives rows {parts} for micro-batch {number}: they must join without gaps")
        spans.add((parts[0][0], parts[-1][1]))
        if (work, chunk, (number + 1) % micro_batches) not in rows:
            raise ScheduleError(rank, f"receives for micro-batch {number} but not for the one after it")
    if len(spans) > 1:
        raise ScheduleError(rank, f"runs different rows in different micro-batches: {sorted(spans)}")
