"""Wrong serving loops, each the right one but for one fault."""

from typing import Any

from perf_lab.serving import Server, held, serving

from . import mutant

ALONE = "test_paged_serving::test_each_request_gets_the_tokens_it_gets_alone"
FIRST = "test_paged_serving::test_the_one_that_arrived_first_gets_on_at_every_step"
LARGEST = "test_paged_serving::test_the_tokens_of_a_float32_loop_have_the_largest_logits"
WARM = "test_paged_serving::test_a_warm_prompt_gets_the_tokens_of_a_cold_one"


@mutant(serving, killed_by=WARM)
class CountsThePromptAgain(Server):
    """PG9: how much of a prompt is to be computed is counted before the hit is known."""

    def _admitted(self) -> Any:
        job = super()._admitted()
        if job and 0 < held(job).length < len(held(job).tokens) - 1:
            self.pool.commit(held(job), 1)
        return job


@mutant(serving, killed_by=ALONE)
class ForgetsItsTokens(Server):
    """A preempted request starts again with its prompt, and keeps the tokens that it has given."""

    def _admitted(self) -> Any:
        given = [(job.request, job.request.tokens) for job in self.waiting]
        for request, _ in given:
            request.tokens = []
        job = super()._admitted()
        for request, tokens in given:
            request.tokens = tokens
        return job


@mutant(serving, killed_by=ALONE)
class KeepsItsBlocks(Server):
    """A request that has ended keeps its blocks."""

    def _deliver(self, job: Any, token: int) -> None:
        if len(job.request.tokens) + 1 == job.request.new:
            self.pool.fork(held(job))
        super()._deliver(job, token)


@mutant(serving, killed_by=ALONE)
class RunsPastEos(Server):
    """A request goes on after its eos."""

    def _deliver(self, job: Any, token: int) -> None:
        eos, job.request.eos = job.request.eos, None
        super()._deliver(job, token)
        job.request.eos = eos


@mutant(serving, killed_by=(ALONE, LARGEST))
class AnswersInTheWrongOrder(Server):
    """The tokens of a decode step go to the requests in another order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        decode = self.decoder
        self.decoder = lambda sequences: decode(sequences[::-1])  # type: ignore[assignment]


@mutant(serving, killed_by=FIRST)
class PreemptsTheFirst(Server):
    """When the pool is full, the request that arrived first gives way."""

    def _with_room(self, ready: list[Any]) -> list[Any]:
        kept = []
        for job in ready:
            if job.sequence is None:
                continue
            while not self.pool.can_extend(held(job), 1) and self.running[0] is not job:
                if self.running[0] in kept:
                    kept.remove(self.running[0])
                self._preempt(self.running[0])
            if self.pool.can_extend(held(job), 1):
                self.pool.extend(held(job), [job.request.tokens[-1]])
                kept.append(job)
            else:
                self._preempt(job)
        return kept


@mutant(serving, killed_by=FIRST)
class AdmitsTheLatestFirst(Server):
    """The line is a stack."""

    def _admitted(self) -> Any:
        self.waiting.sort(key=lambda job: -job.place)
        return super()._admitted()


@mutant(serving, killed_by="test_paged_serving::test_a_step_computes_no_more_than_it_may")
class WholePrompts(Server):
    """Each prompt has the whole budget of a step."""

    def _prefill(self, job: Any, most: int) -> int:
        super()._prefill(job, self.chunk)
        return 0


@mutant(serving, killed_by="test_paged_serving::test_namespaces_find_nothing_of_each_other")
class OneNamespace(Server):
    """What a tenant sent is found by all."""

    def submit(self, request: Any) -> None:
        request.namespace = None
        super().submit(request)


@mutant(serving, killed_by="test_paged_serving::test_what_can_never_be_served_is_refused")
class TakesAnything(Server):
    """A request larger than the pool waits for ever."""

    def submit(self, request: Any) -> None:
        new, request.new = request.new, 1
        prompt, request.prompt = request.prompt, request.prompt[:1]
        super().submit(request)
        request.new, request.prompt = new, prompt


@mutant(serving, killed_by=WARM)
class ForgetsPrefixes(Server):
    """Every prompt is computed from its start."""

    def submit(self, request: Any) -> None:
        request.namespace = object()
        super().submit(request)
