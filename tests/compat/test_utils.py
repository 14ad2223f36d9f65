"""`raysgd.utils` has the old names, no others, and asks for Ray only where one of them needs it."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError

import raysgd.utils
from raysgd.utils import check_for_failure, override


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = raysgd.utils.nothing_such


class Base:
    def method(self): ...


def test_override_refuses_what_overrides_nothing():
    with pytest.raises(AssertionError, match="'mehtod' overrides nothing: Base"):

        class Child(Base):
            @override(Base)
            def mehtod(self): ...


@pytest.fixture
def calls(monkeypatch):
    """Stands in for Ray: a reference is what its call gives, an error to be raised, or `...` for a hang."""

    def wait(refs, *, num_returns, timeout):
        ended = [ref for ref in refs if ref is not ...][-num_returns:]
        return ended, [ref for ref in refs if ref not in ended]

    def get(refs):
        for ref in refs:
            if isinstance(ref, Exception):
                raise ref

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)


@pytest.mark.parametrize(
    ("refs", "all_well"),
    [
        ([], True),
        ([1, 1], True),
        ([RayActorError()], False),
        ([1, ActorDiedError(), 3], False),
        ([..., RayActorError()], False),
    ],
)
def test_only_a_dead_actor_is_a_failure(calls, refs, all_well):
    assert check_for_failure(refs) is all_well


def test_an_error_of_the_call_itself_is_raised(calls):
    with pytest.raises(ZeroDivisionError):
        check_for_failure([1, ZeroDivisionError()])


def test_a_limit_ends_the_wait(calls):
    with pytest.raises(TimeoutError, match=r"within 0.1 s; 1 are still running"):
        check_for_failure([1, ...], timeout_s=0.1)
