"""Whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass

from starquill.engine.scheduler import Scheduler, Work


@dataclass(eq=False)
class Job:
    name: str
    need: int = 1
    pieces: int = 1  # of its prompt
    tokens: int = 1

    def __repr__(self) -> str:
        return self.name


def run(scheduler: Scheduler[Job], steps: int = 1000) -> list[str]:
    """What is done, until nothing is left: `a` a piece of a's prompt, `(bc)` a step for both."""
    done = []
    while steps and (work := scheduler.next()):
        steps -= 1
        done.append(work.fill.name if work.fill else f"({''.join(j.name for j in work.write)})")
        _carry_out(scheduler, work)
    return done


def _carry_out(scheduler: Scheduler[Job], work: Work[Job]) -> None:
    if job := work.fill:
        job.pieces -= 1
        if not job.pieces:
            scheduler.filled(job)
    for job in work.write:
        job.tokens -= 1
        if not job.tokens:
            scheduler.remove(job)


def scheduler_of(*jobs: Job, slots: int = 10, room: int = 100) -> Scheduler[Job]:
    scheduler: Scheduler[Job] = Scheduler(slots, room)
    for job in jobs:
        scheduler.add(job)
    return scheduler


def test_those_that_write_get_a_step_between_pieces() -> None:
    scheduler = scheduler_of(Job("a", tokens=3), Job("b", pieces=3, tokens=2))
    assert run(scheduler) == ["a", "(a)", "b", "(a)", "b", "(a)", "b", "(b)", "(b)"]


def test_prompts_one_after_the_other() -> None:
    scheduler = scheduler_of(Job("a", pieces=2), Job("b", pieces=2))
    assert run(scheduler) == ["a", "a", "(a)", "b", "b", "(b)"]


def test_no_more_than_slots() -> None:
    scheduler = scheduler_of(*(Job(name, tokens=2) for name in "abc"), slots=2)
    done = run(scheduler)
    assert done == ["a", "(a)", "b", "(ab)", "c", "(bc)", "(c)"]


def test_the_first_waits_for_room_and_nobody_overtakes() -> None:
    scheduler = scheduler_of(Job("a", 6, tokens=2), Job("b", 6), Job("c", 1), room=10)
    assert run(scheduler) == ["a", "(a)", "(a)", "b", "(b)", "c", "(c)"]


def test_removing_in_any_state() -> None:
    jobs = [Job("a", tokens=9), Job("b", pieces=9), Job("c")]
    scheduler = scheduler_of(*jobs)
    run(scheduler, 3)
    assert (scheduler.running, list(scheduler.waiting)) == ([jobs[0], jobs[1]], [jobs[2]])
    for job in jobs:
        scheduler.remove(job)
        scheduler.remove(job)
    assert len(scheduler) == 0
    assert scheduler.next() is None


def test_nothing_to_do() -> None:
    assert scheduler_of().next() is None
