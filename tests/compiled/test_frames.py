"""`with_room_for_frames`: calls at the end of a chunk of Python's frames map no memory."""

import resource

from lowtide.compiled.capture import with_room_for_frames


def _page_faults_of_calls(depth: int) -> int:
    """Page faults of 2,000 calls from so deep in the stack."""
    if depth:
        return _page_faults_of_calls(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2_000):
        _call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _call() -> None:
    """A call whose frame is longer than that of `_page_faults_of_calls`: it does not fit at some depth."""


_call.__code__ = _call.__code__.replace(co_stacksize=200)

DEPTHS = range(250)  # frames of some 100 bytes: more than one chunk of 16 KiB


def test_somewhere_in_the_stack_every_call_maps_memory() -> None:
    """Once this fails, Python keeps its chunks, and `with_room_for_frames` may go."""
    assert max(map(_page_faults_of_calls, DEPTHS)) > 1_000


def test_with_room_for_frames_none_does() -> None:
    roomy = with_room_for_frames(_page_faults_of_calls)
    assert max(map(roomy, DEPTHS)) < 1_000


def test_arguments_results_and_name_go_through() -> None:
    @with_room_for_frames
    def add(one: int, *, other: int) -> int:
        return one + other

    assert add(1, other=2) == 3 and add.__name__ == "add"
