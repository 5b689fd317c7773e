"""Wrong courses of `perf-lab ab`."""

from perf_lab.measure.ab import Course
from perf_lab.measure.gate import Policy, Times
from perf_lab.op import Op

from . import mutant

course = Op("course")
course.register("perf_lab", devices=("cpu",))(Course)


@mutant(course, killed_by="test_ab::test_what_moved_is_judged_only_at_the_looks")
class Peeking(Course):
    """What moved is judged after every pair."""

    def __init__(self, policy: Policy, pairs: int, max_pairs: int) -> None:
        super().__init__(policy, pairs, max_pairs)
        self.looks = list(range(1, max_pairs + 1))


@mutant(course, killed_by="test_ab::test_what_moved_is_judged_only_at_the_looks")
class Forgetful(Course):
    """What is the same is neither done nor run again."""

    def after(self, pair: int, base: Times, head: Times) -> None:
        super().after(pair, base, head)
        self.decided = {name: t for name, t in self.decided.items() if t.moved}
