"""A small continuous-batching loop: requests come and go, each step computes whatever there is to compute.

    server = Server(model, pool, most=32, chunk=512)
    tokens = server.run([Request(prompt, 100), Request(other, 20, eos=0)])

A step: compute up to `chunk` prompt tokens, of the requests admitted before, then of waiting ones, which are
admitted in the order of their arrival as long as rows and blocks last; then one decode step for every request
whose prompt is computed, all in one forward. A request ends with its eos or its last token, and its blocks go
back to the pool.

greedy      a token is that of the largest logit, the lowest id of equal ones: what `generate` gives the
            request alone, up to the rounding of logits in forwards of other sizes.
full        when a request needs a block and there is none, the one that arrived last gives all of its blocks
            back, and is admitted again, with its tokens as a prompt, before any that arrived after it.
starving    nobody does: the request that arrived first is never preempted for another, it is admitted
            before all others, and every step computes at least one of its tokens. A request that would not
            fit even alone is a ValueError when it is submitted.
prefix      what the pool finds of a prompt is not computed again; requests share it within their `namespace`.
device      a step sends one small tensor to the device (tokens, lengths, tables) and reads tokens back;
            on a CUDA device the decode step is recorded once for each of the batch sizes 1, 2, 4, ... and
            replayed.

Sources: Yu et al., Orca, OSDI 2022 (iteration-level batching); Kwon et al., arXiv:2309.06180 (preemption by
recomputing); Agrawal et al., Sarathi, arXiv:2308.16369 (prompts in chunks beside decoding).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perf_lab.decode import record
from perf_lab.kv_cache.pool import Pool
from perf_lab.kv_cache.pool import Sequence as Held
from perf_lab.kv_cache.rows import Rows
from perf_lab.op import Op

serving: Op = Op("serving", reference="loop")


@dataclass(eq=False)
class Request:
    """A prompt and how much to generate. `tokens` are the new ones so far, `done` says that these are all.

    Raises ValueError or TypeError for an empty prompt or no tokens to generate.
    """

    prompt: Sequence[int]
    new: int
    eos: int | None = None
    namespace: Hashable = None
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    found: int = 0  # tokens of the prompt that were in the pool when it was admitted first

    def __post_init__(self) -> None:
        if not self.prompt or any(not isinstance(token, int) for token in self.prompt):
            raise ValueError(f"prompt: got {self.prompt!r}, accepted are one or more ints")
        if not isinstance(self.new, int) or self.new < 1:
            raise ValueError(f"new: got {self.new!r}, accepted are whole numbers from 1")

    @property
    def known(self) -> list[int]:
        """Prompt and new tokens."""
        return [*self.prompt, *self.tokens]


@dataclass(eq=False)
class Job:
    """A submitted request, its place in the order of arrival, and its sequence while it is admitted."""

    request: Request
    place: int
    sequence: Held | None = None


@serving.register("loop")
class Server:
    """The loop; its rules are the docstring of perf_lab.serving.

    model   as perf_lab.model says, with `step`; of the pool's sizes.
    pool    where the keys and values lie. What it holds already is found.
    most    rows of a decode step. chunk: prompt tokens that a step computes at most.
    graphs  whether decode steps are replayed from CUDA graphs; default: on a CUDA device.
    """

    def __init__(
        self, model: Any, pool: Pool, *, most: int = 32, chunk: int = 512, graphs: bool | None = None
    ) -> None:
        for name, size in (("most", most), ("chunk", chunk)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}, accepted are whole numbers from 1")
        self.model, self.pool, self.most, self.chunk = model, pool, most, chunk
        self.waiting: list[Job] = []  # by place
        self.running: list[Job] = []  # by place
        self.submitted = self.preemptions = self.steps = 0
        if graphs is None:
            graphs = pool.k.is_cuda and pool.k.dtype is not torch.float64  # whose attention reads on the host
        self.decoder = Decoder(model, pool, most, graphs)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the line. Raises ValueError for one that can never be served."""
        slots = len(request.prompt) + request.new - 1  # the last token is not computed
        blocks, size = self.pool.blocks.total, self.pool.block_size
        if slots > min(blocks * size, self.model.config.max_length):
            raise ValueError(
                f"request: got {slots} tokens to compute, accepted are {blocks * size} (the pool) and "
                f"{self.model.config.max_length} (the model's max_length) at most"
            )
        self.waiting.append(Job(request, self.submitted))
        self.submitted += 1

    def run(self, requests: Iterable[Request]) -> list[list[int]]:
        """Serve them to the end; the new tokens of each."""
        requests = list(requests)
        for request in requests:
            self.submit(request)
        while not self.idle:
            self.step()
        return [request.tokens for request in requests]

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.running)

    @torch.no_grad()
    def step(self) -> None:
        """Admit, compute prompts, decode."""
        self.steps += 1
        budget = self.chunk
        for job in list(self.running):
            budget -= self._prefill(job, budget)
        while budget and (admitted := self._admitted()):
            budget -= self._prefill(admitted, budget)
        self._decode()

    def _admitted(self) -> Job | None:
        """The first in line, with slots for its tokens, if it can have them. Prompts before it are computed:
        it finds what it shares with them.
        """
        if not self.waiting or len(self.running) == self.most:
            return None
        job = self.waiting[0]
        tokens, namespace = job.request.known, job.request.namespace
        if not self.pool.can_allocate(tokens, namespace):
            return None
        job.sequence = self.pool.allocate(tokens, namespace)
        if not job.request.tokens:
            job.request.found = job.sequence.length
        self.running.append(self.waiting.pop(0))
        self.running.sort(key=lambda job: job.place)
        return job

    def _prefill(self, job: Job, most: int) -> int:
        """Compute up to `most` tokens of a prompt that are left; how many these were."""
        sequence = held(job)
        left = len(sequence.tokens) - sequence.length
        n = min(left, most)
        if n:
            logits = self._forward(sequence, n)
            self.pool.commit(sequence, n)
            if n == left:
                self._deliver(job, int(logits.argmax(-1)))
        return n

    def _forward(self, sequence: Held, n: int) -> Tensor:
        """Logits [V] after the next n tokens of a sequence."""
        new = sequence.tokens[sequence.length : sequence.length + n]
        tokens = torch.tensor([new], device=self.pool.k.device)
        return self.model(tokens, Rows.of(self.pool, [sequence]), last_only=True)[0, -1]

    def _decode(self) -> None:
        """One token of every request whose prompt is computed: its latest one is given to the model."""
        ready = [job for job in self.running if self._is_computed(job)]
        ready = self._with_room(ready)
        if not ready:
            return
        chosen = self.decoder([held(job) for job in ready])
        for job, token in zip(ready, chosen, strict=True):
            self.pool.commit(held(job), 1)
            self._deliver(job, token)

    def _is_computed(self, job: Job) -> bool:
        return held(job).length == len(held(job).tokens) == len(job.request.known) - 1

    def _with_room(self, ready: list[Job]) -> list[Job]:
        """Those that have a slot for their latest token: whoever arrived last gives way to those before."""
        kept = []
        for job in ready:
            if job.sequence is None:  # preempted for one before it
                continue
            while not self.pool.can_extend(held(job), 1) and self.running[-1] is not job:
                self._preempt(self.running[-1])
            if self.pool.can_extend(held(job), 1):
                self.pool.extend(held(job), [job.request.tokens[-1]])
                kept.append(job)
            else:
                self._preempt(job)
        return kept

    def _preempt(self, job: Job) -> None:
        """Back to the line, before all that arrived later; its blocks to the pool."""
        self.preemptions += 1
        self._release(job)
        self.waiting.append(job)
        self.waiting.sort(key=lambda job: job.place)

    def _release(self, job: Job) -> None:
        self.pool.free(held(job))
        job.sequence = None
        self.running.remove(job)

    def _deliver(self, job: Job, token: int) -> None:
        request = job.request
        request.tokens.append(token)
        request.done = len(request.tokens) == request.new or token == request.eos
        if request.done:
            self._release(job)


class Decoder:
    """One token for each of some sequences, in one forward over rows of static tensors.

    Everything that changes from step to step is in one host tensor, [rows, 2 + M] int32: the token, how many
    tokens the row has, and its table. It is copied as a whole; the forward reads its parts on the device.
    """

    def __init__(self, model: Any, pool: Pool, most: int, graphs: bool) -> None:
        self.model, self.pool, self.graphs = model, pool, graphs
        slots = min(pool.blocks.total * pool.block_size, model.config.max_length)
        width = 2 + -(-slots // pool.block_size)
        self.host = torch.zeros(most, width, dtype=torch.int32, pin_memory=pool.k.is_cuda)
        self.device = self.host.to(pool.k.device)
        self.recorded: dict[int, tuple[Any, Tensor]] = {}  # rows: graph, and where it leaves the tokens

    def __call__(self, sequences: list[Held]) -> list[int]:
        """The token after each sequence, whose last one has a slot and is not computed yet."""
        count = len(sequences)
        rows = min(len(self.host), 1 << (count - 1).bit_length()) if self.graphs else count
        self._describe(sequences, rows)
        return self._chosen(rows)[:count].tolist()

    def _describe(self, sequences: list[Held], rows: int) -> None:
        """Fill the host's tensor and send it; rows that nobody has get a start of -1."""
        host, widest = self.host, 2 + max(len(sequence.blocks) for sequence in sequences)
        lines = [
            [sequence.tokens[sequence.length], sequence.length, *sequence.blocks] for sequence in sequences
        ]
        lines += [[0, -1]] * (rows - len(sequences))
        padded = [line + [0] * (widest - len(line)) for line in lines]
        host[:rows, :widest] = torch.tensor(padded, dtype=torch.int32)
        self.device[:rows].copy_(host[:rows], non_blocking=True)

    def _chosen(self, rows: int) -> Tensor:
        """The tokens [rows] int64 on the device."""
        if not self.graphs:
            return self._forward(rows)
        if rows not in self.recorded:
            self._forward(rows)  # what a graph may not do: compile, and make workspaces
            kept: list[Tensor] = []
            graph = record(lambda: kept.append(self._forward(rows)))
            self.recorded[rows] = graph, kept[0]
        graph, tokens = self.recorded[rows]
        graph.replay()
        return tokens

    def _forward(self, rows: int) -> Tensor:
        state = self.device[:rows]
        starts, tables = state[:, 1], state[:, 2:]
        cache = Rows(self.pool, tables, starts, known=tables.shape[1] * self.pool.block_size)
        where = cache.where(1) if rows > 1 else starts.clamp(min=0)[:, None]
        logits = self.model.step(state[:, :1].long(), cache, where)  # [rows, 1, V]
        return logits[:, -1].argmax(-1)


def held(job: Job) -> Held:
    """The sequence of a job that was admitted."""
    assert job.sequence is not None
    return job.sequence
